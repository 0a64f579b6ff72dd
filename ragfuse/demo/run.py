"""`ragfuse demo`: real questions over real documents through a LangChain chain, full prefill and
ragfuse side by side.

Retrieval, prompt and chain are LangChain's; only the chat model is ours. No question is chosen by
how it is answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean
from typing import Any

from rich.console import Console

from ragfuse.calibration.metrics import is_right
from ragfuse.demo import corpus_path, questions
from ragfuse.demo.show import question_text
from ragfuse.engine.engine import Engine, Ingested
from ragfuse.models import quietly, resolve_embedder
from ragfuse.text.splits import split_text
from ragfuse.types.sizes import duration_text, size_text

DEMO_ANSWER_TOKENS = 24
CHUNK_TOKENS = 230
"""Most tokens of a chunk; the splitter fills them to 160 on average."""
INTRODUCTION = (
    "{articles} articles are cut into {passages} passages. Each question is asked over the six that"
    " suit it best: 1,000 tokens to read before the first word. Full prefill computes them anew for"
    " every question. ragfuse computes each passage once, takes it from its store from then on, and"
    " recomputes about a tenth."
)
"""What the demo says first."""

WARM_UP = "What is told here?"
"""A question to warm up with. It differs from the timed ones, whose beginnings must not be in the
store before.
"""


def run(engine: Engine, console: Console) -> dict[str, Any]:
    """Ingest the corpus, ask all questions, and return the report, which becomes
    demo-report.json.
    """
    data, say = questions(), partial(console.print, highlight=False, markup=False, soft_wrap=True)
    with console.status("indexing passages"):
        demo = Demo(engine, data["template"])
    n_articles = len({source for _, source in demo.texts})
    say(INTRODUCTION.format(articles=n_articles, passages=len(demo.texts)))
    with console.status("computing the KV of passages"):
        done = demo.ingest([item["question"] for item in data["questions"]])
    how = f"{done.tokens:,} tokens, {size_text(done.nbytes)}, {duration_text(done.seconds)}"
    computed = f"The KV of {done.encoded} was computed now ({how})." if done.encoded else ""
    say(f"The questions find {done.chunks} of these passages. {computed or 'All are stored.'}\n")
    with console.status("warming up"):
        demo.warm_up()
    answers = list[dict[str, Any]]()
    for number, item in enumerate(data["questions"], 1):
        with console.status(f"question {number} of {len(data['questions'])}, both ways"):
            answers.append(demo.ask(item["question"], item["answers"]))
        say(question_text(answers[-1]) + "\n")
        if number == 1:
            say(f"{len(data['questions']) - 1} more questions. {data['chosen_how']}\n")
    full, fused = (mean(each[f"ttft_{of}_s"] for each in answers) for of in ("full", "fused"))
    chosen = {f"{each['trace']['policy']} {each['trace']['ratio']:g}" for each in answers}
    return {
        "mean_ttft_full_s": full,
        "mean_ttft_fused_s": fused,
        "mean_speedup": full / fused,
        "right_full": sum(each["right_full"] for each in answers),
        "right_fused": sum(each["right_fused"] for each in answers),
        "policies": sorted(chosen),
        "model": engine.settings.model,
        "questions": answers,
    }


class Demo:
    """The demo's chain.

    Args:
        engine: The engine.
        template: The texts of the prompt by role.
    """

    def __init__(self, engine: Engine, template: dict[str, str]) -> None:
        from langchain_community.vectorstores import FAISS
        from langchain_core.prompts import ChatPromptTemplate
        from langchain_core.runnables import RunnablePassthrough
        from langchain_huggingface import HuggingFaceEmbeddings
        from langchain_ragfuse import ChatRagFuse

        self.engine = engine
        self.texts = _split_corpus(engine)
        source = resolve_embedder(engine.settings.embedder, engine.settings.home)
        with quietly(source):
            embedder = HuggingFaceEmbeddings(model_name=str(source))
            found = FAISS.from_texts([text for text, _ in self.texts], embedder)
        self.retriever = found.as_retriever(search_kwargs={"k": 6})
        roles = [(role, template[role]) for role in ("system", "human") if template.get(role)]
        inputs = {"context": self.retriever | _join_texts, "question": RunnablePassthrough()}
        self.chain: Any = inputs | ChatPromptTemplate.from_messages(roles)
        self.llm = ChatRagFuse(engine=engine, max_tokens=DEMO_ANSWER_TOKENS)

    def ingest(self, asked: Sequence[str]) -> Ingested:
        """Compute the KV of the chunks that questions find, and have what an earlier run stored in
        memory, too.

        KV of the other chunks would only delay the first question.
        """
        found = {
            each.page_content for question in asked for each in self.retriever.invoke(question)
        }
        done = self.engine.ingest([chunk for chunk in self.texts if chunk[0] in found])
        self.engine.prefetch(found)
        self.engine.flush()
        return done

    def warm_up(self) -> None:
        """Answer a question both ways, unmeasured, so that first-call costs of the process are not
        measured.

        What it leaves to encode is waited for, as somebody who reads an answer does.
        """
        for reuse in (False, True):
            self._invoke(WARM_UP, reuse)
        self.engine.flush()

    def ask(self, question: str, golds: Sequence[str]) -> dict[str, Any]:
        """Answer a question both ways, and return both answers, their times to the first token and
        what was reused, in plain JSON types.
        """
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


def _split_corpus(engine: Engine) -> list[tuple[str, str]]:
    """Return (text, source) of the corpus' chunks."""
    settings = engine.settings.model_copy(update={"chunk_tokens": CHUNK_TOKENS, "chunk_overlap": 0})
    return [
        (text.strip(), file.name)
        for file in sorted(corpus_path().glob("*.md"))
        for text in split_text(file.read_text("utf-8"), settings, engine.model.tokenizer)
    ]


def _join_texts(documents: Sequence[Any]) -> str:
    return "\n\n".join(document.page_content for document in documents)
