"""`ragfuse demo`: real questions over real documents through a LangChain chain, full prefill and
ragfuse side by side.

Retrieval, prompt and chain are LangChain's; only the chat model is ours. No question is chosen by
how it is answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from rich.console import Console

from ragfuse.calibration.fidelity import fidelity
from ragfuse.calibration.metrics import is_right
from ragfuse.demo import corpus_path, questions
from ragfuse.demo.answer import DemoAnswer
from ragfuse.demo.show import show_question, show_strip
from ragfuse.engine.engine import Engine, Ingested
from ragfuse.models import quietly, resolve_embedder
from ragfuse.telemetry.progress import progress
from ragfuse.types.keys import digest
from ragfuse.types.sizes import duration_text, size_text

DEMO_ANSWER_TOKENS = 24
CHUNK_TOKENS = 230
"""Most tokens of a chunk; the splitter fills them to 160 on average."""

LONG_CHUNK_TOKENS = 512
"""Most tokens of a chunk of the long prompt."""
LONG_TRIES = 3
"""How often the long prompt is asked; the middle one counts."""
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
    data = questions()
    short = Demo(engine, data["template"], CHUNK_TOKENS)
    n_articles = len({source for _, source in short.texts})
    console.print(
        INTRODUCTION.format(articles=n_articles, passages=len(short.texts)), highlight=False
    )
    short.index("indexing passages", console)
    done = short.ingest(
        [item["question"] for item in data["questions"]], "computing the KV of passages", console
    )
    console.print(
        f"The questions find {done.chunks} of these passages. The KV of {done.encoded} was computed"
        f" now ({done.tokens:,} tokens, {size_text(done.nbytes)}, {duration_text(done.seconds)});"
        " that of the others is in the store.\n",
        highlight=False,
    )
    with console.status("warming up"):
        short.warm_up()
    answers = list[DemoAnswer]()
    for number, item in enumerate(data["questions"], 1):
        with console.status(f"question {number} of {len(data['questions'])}, both ways"):
            answers.append(short.ask(item["question"], item["answers"]))
        show_question(console, answers[-1])
        if number == 1:
            console.print("Its prompt, token by token:", highlight=False)
            show_strip(console, answers[-1])
            console.print(
                f"{len(data['questions']) - 1} more questions. {data['chosen_how']}\n",
                highlight=False,
            )
    long = Demo(engine, data["template"], LONG_CHUNK_TOKENS)
    long.index("indexing passages anew, in larger pieces", console)
    long.ingest([data["long"]["question"]], "computing the KV of longer passages", console)
    with console.status("a long prompt, three times both ways"):
        long.warm_up()
        tries = [
            long.ask(data["long"]["question"], data["long"]["answers"]) for _ in range(LONG_TRIES)
        ]
    longest = sorted(tries, key=lambda answer: answer.speedup)[LONG_TRIES // 2]
    console.print(
        "One long prompt: six passages of up to 512 tokens. The middle one of three tries.",
        highlight=False,
    )
    show_question(console, longest)
    return report(answers, longest, engine)


def report(answers: Sequence[DemoAnswer], longest: DemoAnswer, engine: Engine) -> dict[str, Any]:
    """Return the averages and all answers in plain JSON types."""
    return {
        "mean_speedup": (
            mean(answer.ttft_full_s for answer in answers)
            / mean(answer.ttft_fused_s for answer in answers)
        ),
        "long_speedup": longest.speedup,
        "right_full": sum(answer.right_full for answer in answers),
        "right_fused": sum(answer.right_fused for answer in answers),
        "kl_over_reuse": (
            mean(answer.kl_fused for answer in answers)
            / mean(answer.kl_reuse for answer in answers)
        ),
        "policies": sorted(
            {
                f"{answer.trace['policy']} {answer.trace['ratio']:g}"
                for answer in (*answers, longest)
            }
        ),
        "model": engine.settings.model,
        "questions": [asdict(answer) for answer in answers],
        "long": asdict(longest),
    }


class Demo:
    """The demo's chain over chunks of one size.

    Args:
        engine: The engine.
        template: The texts of the prompt by role.
        chunk_tokens: Most tokens of a chunk.
    """

    def __init__(self, engine: Engine, template: dict[str, str], chunk_tokens: int) -> None:
        from langchain_core.prompts import ChatPromptTemplate
        from langchain_ragfuse import ChatRagFuse

        self.engine = engine
        roles = [(role, template[role]) for role in ("system", "human") if template.get(role)]
        self.prompt = ChatPromptTemplate.from_messages(roles)
        self.llm = ChatRagFuse(engine=engine, max_tokens=DEMO_ANSWER_TOKENS)
        self.texts = _split_corpus(engine, chunk_tokens)
        self.retriever: Any = None
        self.chain: Any = None

    def index(self, what: str, console: Console) -> None:
        """Index all chunks with FAISS; vectors of an earlier run are taken from the home folder."""
        from langchain_classic.embeddings import CacheBackedEmbeddings
        from langchain_classic.storage import LocalFileStore
        from langchain_community.vectorstores import FAISS
        from langchain_core.runnables import RunnablePassthrough
        from langchain_huggingface import HuggingFaceEmbeddings

        source = resolve_embedder(self.engine.settings.embedder, self.engine.settings.home)
        with quietly(source):
            embedder = HuggingFaceEmbeddings(model_name=str(source))
        kept = LocalFileStore(self.engine.settings.store_path / "vectors")
        embeddings = CacheBackedEmbeddings.from_bytes_store(
            embedder, kept, namespace=digest(str(source)), key_encoder="sha256"
        )
        texts = [text for text, _ in self.texts]
        with console.status(what):
            found = FAISS.from_texts(texts, embeddings)
        self.retriever = found.as_retriever(search_kwargs={"k": 6})
        inputs = {"context": self.retriever | _join_texts, "question": RunnablePassthrough()}
        self.chain = inputs | self.prompt

    def ingest(self, asked: Sequence[str], what: str, console: Console) -> Ingested:
        """Compute the KV of the chunks that questions find, and have what an earlier run stored in
        memory, too.

        KV of the other chunks would only delay the first question.
        """
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
        """Answer a question both ways, unmeasured, so that first-call costs of the process are not
        measured.

        What it leaves to encode is waited for, as somebody who reads an answer does.
        """
        for reuse in (False, True):
            self._invoke(WARM_UP, reuse)
        self.engine.flush()

    def ask(self, question: str, golds: Sequence[str]) -> DemoAnswer:
        """Answer a question both ways, and measure the KL of fused and of plainly reused KV to full
        prefill.

        The KL is measured before the fused answer, which leaves the first chunk exact for the next
        prompt like it.
        """
        full = self._invoke(question, reuse=False)
        messages = self.chain.invoke(question).to_messages()
        roles = {"human": "user", "system": "system"}
        prompt = self.engine.prompt(
            [(roles[message.type], str(message.content)) for message in messages]
        )
        kl = fidelity(self.engine, prompt, self.engine.tokens(full.content))
        fused = self._invoke(question, reuse=True)
        fused_trace, full_trace = (
            fused.response_metadata["ragfuse"],
            full.response_metadata["ragfuse"],
        )
        return DemoAnswer(
            question=question,
            gold=golds[0],
            answer_full=_line(full.content),
            answer_fused=_line(fused.content),
            right_full=is_right(full.content, golds),
            right_fused=is_right(fused.content, golds),
            ttft_full_s=full_trace["ttft_s"],
            ttft_fused_s=fused_trace["ttft_s"],
            speedup=full_trace["ttft_s"] / fused_trace["ttft_s"],
            tokens=fused_trace["tokens"],
            tokens_reused=fused_trace["tokens_reused"],
            tokens_recomputed=fused_trace["tokens_recomputed"],
            kl_fused=kl.fused,
            kl_reuse=kl.reuse,
            trace=fused_trace,
        )

    def _invoke(self, question: str, reuse: bool) -> Any:
        return (self.chain | self.llm.bind(reuse=reuse)).invoke(question)


def _split_corpus(engine: Engine, chunk_tokens: int) -> list[tuple[str, str]]:
    """Split the corpus with LangChain's splitter; return (text, source) of chunks of at most
    `chunk_tokens` tokens.
    """
    from langchain_text_splitters import RecursiveCharacterTextSplitter

    splitter = RecursiveCharacterTextSplitter.from_huggingface_tokenizer(
        engine.model.tokenizer, chunk_size=chunk_tokens, chunk_overlap=0
    )
    files = sorted(corpus_path().glob("*.md"))
    return [
        (text.strip(), file.name)
        for file in files
        for text in splitter.split_text(file.read_text("utf-8"))
    ]


def _join_texts(documents: Sequence[Any]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def _line(text: str) -> str:
    return " ".join(text.split())
