"""`ragfuse demo`: real questions over real documents through a LangChain chain, comparing full
prefill with ragfuse.

Retrieval, prompt and chain are LangChain's; only the chat model is ragfuse's. The questions were
written before any model was asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from statistics import mean
from typing import Any

from rich.console import Console

from ragfuse.calibration.case import is_right
from ragfuse.demo import corpus_path, questions
from ragfuse.demo.show import question_text
from ragfuse.engine.engine import Engine, Ingested
from ragfuse.models import quietly, resolve_embedder
from ragfuse.telemetry.progress import progress
from ragfuse.text.file_texts import split_text
from ragfuse.types.sizes import duration_text, size_text

DEMO_ANSWER_TOKENS = 24
CHUNK_TOKENS = 230
"""Maximum tokens of a chunk. The resulting chunks have 160 tokens on average."""

LONG_CHUNK_TOKENS = 512
"""Maximum tokens of a chunk of the long prompt."""
LONG_TRIES = 3
"""Number of times the long prompt is asked. The try with the median speedup is reported."""
INTRODUCTION = (
    "{articles} articles are cut into {passages} passages. Each question is asked over the six"
    " most similar passages, about 1,000 tokens. Full prefill computes them for every question;"
    " ragfuse computes each passage once, reuses its stored KV and recomputes about a tenth."
)
"""The text that the demo prints first."""

WARM_UP = "What is told here?"
"""The warm-up question. The warm-up prompt must not begin with the chunks of a timed prompt,
because the prefix cache would reuse these chunks in the timed prompt.
"""


def run(engine: Engine, console: Console) -> dict[str, Any]:
    """Ingest the corpus, ask all questions, and return the report."""
    data, say = questions(), partial(console.print, highlight=False, markup=False, soft_wrap=True)
    short = Demo(engine, data["template"], CHUNK_TOKENS)
    n_articles = len({source for _, source in short.texts})
    say(INTRODUCTION.format(articles=n_articles, passages=len(short.texts)))
    short.index("indexing passages", console)
    done = short.ingest(
        [item["question"] for item in data["questions"]], "computing the KV of passages", console
    )
    how = f"{done.tokens:,} tokens, {size_text(done.nbytes)}, {duration_text(done.seconds)}"
    computed = f"The KV of {done.encoded} was computed now ({how})." if done.encoded else ""
    say(f"The questions need {done.chunks} of these passages. {computed or 'All are stored.'}\n")
    with console.status("warming up"):
        short.warm_up()
    answers = list[dict[str, Any]]()
    for number, item in enumerate(data["questions"], 1):
        with console.status(f"question {number} of {len(data['questions'])}, both ways"):
            answers.append(short.ask(item["question"], item["answers"]))
        say(question_text(answers[-1]) + "\n")
        if number == 1:
            say(f"{len(data['questions']) - 1} more questions. {data['chosen_how']}\n")
    long = Demo(engine, data["template"], LONG_CHUNK_TOKENS)
    long.index("indexing passages anew, in larger pieces", console)
    long.ingest([data["long"]["question"]], "computing the KV of longer passages", console)
    with console.status("a long prompt, three times both ways"):
        long.warm_up()
        tries = [
            long.ask(data["long"]["question"], data["long"]["answers"]) for _ in range(LONG_TRIES)
        ]
    longest = sorted(tries, key=itemgetter("speedup"))[LONG_TRIES // 2]
    say("One long prompt: six passages of up to 512 tokens. Median of three tries.")
    say(question_text(longest) + "\n")
    return report(answers, longest, engine)


def report(
    answers: Sequence[dict[str, Any]], longest: dict[str, Any], engine: Engine
) -> dict[str, Any]:
    """Return the demo's report in JSON types: speedups, numbers of right answers, all answers."""
    full, fused = (mean(each[f"ttft_{of}_s"] for each in answers) for of in ("full", "fused"))
    chosen = {f"{each['trace']['policy']} {each['trace']['ratio']:g}" for each in answers}
    return {
        "mean_speedup": full / fused,
        "long_speedup": longest["speedup"],
        "right_full": sum(each["right_full"] for each in answers),
        "right_fused": sum(each["right_fused"] for each in answers),
        "policies": sorted(chosen),
        "model": engine.settings.model,
        "questions": answers,
        "long": longest,
    }


class Demo:
    """The demo's LangChain chain over chunks of one size."""

    def __init__(self, engine: Engine, template: dict[str, str], chunk_tokens: int) -> None:
        from langchain_core.prompts import ChatPromptTemplate
        from langchain_ragfuse import ChatRagFuse

        self.engine = engine
        self.prompt = ChatPromptTemplate.from_messages([*template.items()])
        self.llm = ChatRagFuse(engine=engine, max_tokens=DEMO_ANSWER_TOKENS)
        self.texts = _split_corpus(engine, chunk_tokens)
        self.retriever: Any = None
        self.chain: Any = None

    def index(self, what: str, console: Console) -> None:
        """Index all chunks with FAISS, and build the chain. `what` is the text of the spinner."""
        from langchain_community.vectorstores import FAISS
        from langchain_core.runnables import RunnablePassthrough
        from langchain_huggingface import HuggingFaceEmbeddings

        source = resolve_embedder(self.engine.settings.embedder, self.engine.settings.home)
        with console.status(what), quietly(source):
            embedder = HuggingFaceEmbeddings(model_name=str(source))
            found = FAISS.from_texts([text for text, _ in self.texts], embedder)
        self.retriever = found.as_retriever(search_kwargs={"k": 6})
        context = self.retriever | (lambda found: "\n\n".join(each.page_content for each in found))
        inputs = {"context": context, "question": RunnablePassthrough()}
        self.chain = inputs | self.prompt

    def ingest(self, asked: Sequence[str], what: str, console: Console) -> Ingested:
        """Encode the chunks that the questions retrieve, and prefetch the chunks' KV to memory."""
        with console.status("searching"):
            found = {
                each.page_content for question in asked for each in self.retriever.invoke(question)
            }
        texts = [(text, source) for text, source in self.texts if text in found]
        with progress(console) as bar:
            task = bar.add_task(what, total=len(texts))
            done = self.engine.ingest(
                texts, progress=lambda done: bar.update(task, completed=done.chunks)
            )
        self.engine.prefetch(found)
        self.engine.flush()
        return done

    def warm_up(self) -> None:
        """Answer the warm-up question with and without reuse, and wait until chunks are encoded."""
        for reuse in (False, True):
            self._invoke(WARM_UP, reuse)
        self.engine.flush()

    def ask(self, question: str, golds: Sequence[str]) -> dict[str, Any]:
        """Answer a question with and without reuse, and return answers, TTFTs and trace as JSON."""
        full, fused = (self._invoke(question, reuse) for reuse in (False, True))
        trace = fused.response_metadata["ragfuse"]
        full_s, fused_s = full.response_metadata["ragfuse"]["ttft_s"], trace["ttft_s"]
        return {
            "question": question,
            "gold": golds[0],
            "answer_full": " ".join(full.content.split()),
            "answer_fused": " ".join(fused.content.split()),
            "right_full": is_right(full.content, golds),
            "right_fused": is_right(fused.content, golds),
            "ttft_full_s": full_s,
            "ttft_fused_s": fused_s,
            "speedup": full_s / fused_s,
            **{name: trace[name] for name in ("tokens", "tokens_reused", "tokens_recomputed")},
            "trace": trace,
        }

    def _invoke(self, question: str, reuse: bool) -> Any:
        return (self.chain | self.llm.bind(reuse=reuse)).invoke(question)


def _split_corpus(engine: Engine, chunk_tokens: int) -> list[tuple[str, str]]:
    """Return (text, source) of the corpus' chunks, each of at most `chunk_tokens` tokens."""
    settings = engine.settings.model_copy(update={"chunk_tokens": chunk_tokens, "chunk_overlap": 0})
    return [
        (text.strip(), file.name)
        for file in sorted(corpus_path().glob("*.md"))
        for text in split_text(file.read_text("utf-8"), settings, engine.model.tokenizer)
    ]
