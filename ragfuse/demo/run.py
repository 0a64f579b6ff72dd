"""`ragfuse demo`: real questions over real documents through a LangChain chain, full prefill and ragfuse side by side.

Retrieval, prompt and chain are LangChain's; only the chat model is ours. No question is chosen by how it is answered.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from ragfuse.calibration.fidelity import Fidelity, fidelity
from ragfuse.calibration.metrics import is_right
from ragfuse.demo import corpus_path, questions
from ragfuse.demo.answer import DemoAnswer
from ragfuse.demo.show import show_question, show_strip
from ragfuse.engine.engine import Content, Engine, Ingested
from ragfuse.models import quietly, resolve_embedder
from ragfuse.store.access import make_root
from ragfuse.telemetry.progress import progress
from ragfuse.types.keys import digest
from ragfuse.types.sizes import duration_text, size_text

DEMO_ANSWER_TOKENS = 24
CHUNK_TOKENS = 230
"""Most tokens of a chunk; the splitter fills them to 160 on average."""

EMBEDDED_TOGETHER = 64
"""Passages that are embedded between two steps of the bar."""
LONG_TRIES = 3
"""How often the long prompt is asked; the middle one counts."""
INTRODUCTION = (
    "{articles} articles are cut into {passages} passages. Each question is asked over the six that suit it best: "
    "1,000 tokens to read before the first word. Full prefill computes them anew for every question. ragfuse computes "
    "each passage once, takes it from its store from then on, and recomputes about a tenth."
)
"""What the demo says first."""

WARM_UP = "What is told here?"
"""A question to warm up with. It differs from the timed ones, whose beginnings must not be in the store before."""


def run(engine: Engine, console: Console) -> dict[str, Any]:
    """Ingest the corpus, ask all questions, and return the report, which becomes demo-report.json."""
    data = questions()
    short = Demo(engine, data["template"], chunk_tokens=CHUNK_TOKENS)
    long = Demo(engine, data["template"], chunk_tokens=512)
    short.ingest([item["question"] for item in data["questions"]], console)
    with console.status("warming up"):
        short.warm_up(WARM_UP)
    answers = list[DemoAnswer]()
    for number, item in enumerate(data["questions"], 1):
        with console.status(f"question {number} of {len(data['questions'])}, both ways"):
            answers.append(short.ask(item["question"], item["answers"]))
        show_question(console, answers[-1])
        if number == 1:
            console.print("Its prompt, token by token:", highlight=False)
            show_strip(console, answers[-1])
            console.print(f"{len(data['questions']) - 1} more questions. {data['chosen_how']}\n", highlight=False)
    long.ingest_only_for(data["long"]["question"], console)
    tries = list[DemoAnswer]()
    with progress(console) as bar:
        task = bar.add_task("a long prompt, three times both ways", total=LONG_TRIES)
        long.warm_up(WARM_UP)
        while len(tries) < LONG_TRIES:
            tries.append(long.ask(data["long"]["question"], data["long"]["answers"]))
            bar.update(task, completed=len(tries))
    longest = sorted(tries, key=lambda answer: answer.speedup)[LONG_TRIES // 2]
    console.print("One long prompt: six passages of up to 512 tokens. The middle one of three tries.", highlight=False)
    show_question(console, longest)
    return report(answers, longest, engine)


def report(answers: Sequence[DemoAnswer], longest: DemoAnswer, engine: Engine) -> dict[str, Any]:
    """Return the averages and all answers in plain JSON types."""
    return {
        "mean_speedup": mean(answer.ttft_full_s for answer in answers)
        / mean(answer.ttft_fused_s for answer in answers),
        "long_speedup": longest.speedup,
        "right_full": sum(answer.right_full for answer in answers),
        "right_fused": sum(answer.right_fused for answer in answers),
        "kl_over_reuse": mean(answer.kl_fused for answer in answers) / mean(answer.kl_reuse for answer in answers),
        "policies": sorted({f"{answer.trace['policy']} {answer.trace['ratio']:g}" for answer in (*answers, longest)}),
        "model": engine.settings.model,
        "questions": [asdict(answer) for answer in answers],
        "long": asdict(longest),
    }


class Demo:
    """The demo's chain over chunks of one size."""

    def __init__(self, engine: Engine, template: dict[str, str], chunk_tokens: int) -> None:
        from langchain_core.output_parsers import StrOutputParser
        from langchain_core.prompts import ChatPromptTemplate
        from langchain_ragfuse import ChatRagFuse

        self.engine = engine
        roles = [(role, template[role]) for role in ("system", "human") if template.get(role)]
        self.prompt = ChatPromptTemplate.from_messages(roles)
        self.llm = ChatRagFuse(engine=engine, max_tokens=DEMO_ANSWER_TOKENS)
        self.texts, self.chunk_tokens = _split_corpus(engine, chunk_tokens), chunk_tokens
        self.parser = StrOutputParser()
        self.retriever: Any = None

    def ingest(self, questions: Sequence[str], console: Console) -> None:
        """Index all chunks with FAISS, and compute the KV of the prompt's prefix and of the chunks the questions find.

        KV of the other chunks would only delay the first question.
        """
        n_articles = len({source for _, source in self.texts})
        console.print(INTRODUCTION.format(articles=n_articles, passages=len(self.texts)), highlight=False)
        self._index(console)
        with console.status("searching"):
            found = {document.page_content for question in questions for document in self.retriever.invoke(question)}
        texts = [(text, source) for text, source in self.texts if text in found]
        done = self._encode(texts, "computing the KV of passages", console)
        computed = f"was computed now: {done.tokens:,} tokens, {size_text(done.nbytes)}, {duration_text(done.seconds)}"
        if done.encoded < done.chunks:
            n = f"of {done.encoded} of them " if done.encoded else ""
            computed = f"{n}{computed}" if n else "is in the store from an earlier run"
        console.print(f"The questions find {done.chunks} of these passages. Their KV {computed}.\n", highlight=False)
        self._warm()

    def _encode(self, texts: Sequence[tuple[str, str]], what: str, console: Console) -> Ingested:
        """Compute the KV of (text, source) pairs under a bar."""
        with progress(console) as bar:
            task = bar.add_task(what, total=len(texts))

            def show(done: Ingested) -> None:
                bar.update(task, completed=done.chunks)

            return self.engine.ingest(texts, self._prefix(), show)

    def _warm(self) -> None:
        """Load entries of an earlier run from disk into memory, where an ingest puts them: all runs start alike."""
        engine, entries = self.engine, self.engine.store.entries()
        in_memory = {entry.key for entry in entries if entry.tier != "disk"}
        for entry in entries:
            if entry.key not in in_memory and entry.key.encoded == "filler" and entry.key.model == engine.digest:
                engine.store.read_layers(entry.key, 0, entry.n_layers, entry.tier)

    def ingest_only_for(self, question: str, console: Console) -> None:
        """Index all chunks, and compute the KV of the documents that one question's chunks come from."""
        self._index(console, "indexing passages anew, in larger pieces")
        found = {document.metadata["source"] for document in self.retriever.invoke(question)}
        self._encode([text for text in self.texts if text[1] in found], "computing the KV of longer passages", console)

    def warm_up(self, question: str) -> None:
        """Answer a question both ways, unmeasured, so that first-call costs of the process are not measured.

        What it leaves to encode is waited for, as somebody who reads an answer does.
        """
        for reuse in (False, True):
            self._invoke(question, reuse)
        self.engine.flush()

    def ask(self, question: str, golds: Sequence[str]) -> DemoAnswer:
        """Answer a question both ways, and measure the KL of fused and of plainly reused KV to full prefill.

        The KL is measured before the fused answer, which leaves the first chunk exact for the next prompt like it.
        """
        full = self._invoke(question, reuse=False)
        kl = self._fidelity(question, full.content)
        fused = self._invoke(question, reuse=True)
        fused_trace, full_trace = fused.response_metadata["ragfuse"], full.response_metadata["ragfuse"]
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
            tiers=", ".join(sorted({segment["tier"] for segment in fused_trace["segments"] if segment["hit"]}))
            or "none",
            kl_fused=kl.fused,
            kl_reuse=kl.reuse,
            trace=fused_trace,
        )

    def _index(self, console: Console, what: str = "indexing passages") -> None:
        from langchain_community.vectorstores import FAISS
        from langchain_huggingface import HuggingFaceEmbeddings

        source = resolve_embedder(self.engine.settings.embedder, self.engine.settings.home)
        with quietly(source):
            embeddings = HuggingFaceEmbeddings(model_name=str(source))
        sources = [{"source": source} for _, source in self.texts]
        texts = [text for text, _ in self.texts]
        file = self.engine.settings.store_path / "vectors" / f"{digest('vectors', str(source), *texts)}.npy"
        try:
            vectors = np.load(file, allow_pickle=False)
        except (OSError, ValueError, EOFError):
            vectors = self._embedded(texts, embeddings, what, console)
            make_root(file.parent)
            partial = file.with_name(f".{os.getpid()}.npy")
            np.save(partial, vectors, allow_pickle=False)
            partial.replace(file)
        pairs = zip(texts, vectors.tolist(), strict=True)
        index = FAISS.from_embeddings(pairs, embeddings, metadatas=sources)
        self.retriever = index.as_retriever(search_kwargs={"k": 6})

    def _embedded(self, texts: Sequence[str], embeddings: Any, what: str, console: Console) -> NDArray[np.float32]:
        """Return the vectors of the texts, computed under a bar."""
        found = list[list[float]]()
        with progress(console) as bar:
            task = bar.add_task(what, total=len(texts))
            for at in range(0, len(texts), EMBEDDED_TOGETHER):
                found += embeddings.embed_documents(texts[at : at + EMBEDDED_TOGETHER])
                bar.update(task, completed=len(found))
        return np.asarray(found, dtype=np.float32)

    def _chain(self, reuse: bool) -> Any:
        from langchain_core.runnables import RunnablePassthrough

        inputs = {"context": self.retriever | _join_texts, "question": RunnablePassthrough()}
        return inputs | self.prompt | self.llm.bind(reuse=reuse)

    def _invoke(self, question: str, reuse: bool) -> Any:
        return self._chain(reuse).invoke(question)

    def _messages(self, context: str, question: str) -> list[tuple[str, str]]:
        roles = {"human": "user", "system": "system"}
        messages = self.prompt.format_messages(context=context, question=question)
        return [(roles[message.type], str(message.content)) for message in messages]

    def _prefix(self) -> tuple[int, ...]:
        from ragfuse.text import Piece

        before, after = self._messages("\0", "?")[-1][1].split("\0")
        sample = Piece(self.texts[0][0], "chunk")
        messages: list[tuple[str, Content]] = [*self._messages("", "?")[:-1]]
        return self.engine.prefix([*messages, ("user", (Piece(before), sample, Piece(after)))])

    def _fidelity(self, question: str, answer: str) -> Fidelity:
        messages = self._messages(_join_texts(self.retriever.invoke(question)), question)
        return fidelity(self.engine, self.engine.prompt(messages), self.engine.tokens(answer))


def _split_corpus(engine: Engine, chunk_tokens: int) -> list[tuple[str, str]]:
    """Split the corpus with LangChain's splitter; return (text, source) of chunks of at most `chunk_tokens` tokens."""
    from langchain_text_splitters import RecursiveCharacterTextSplitter

    splitter = RecursiveCharacterTextSplitter.from_huggingface_tokenizer(
        engine.model.tokenizer, chunk_size=chunk_tokens, chunk_overlap=0
    )
    files = sorted(corpus_path().glob("*.md"))
    return [(text.strip(), file.name) for file in files for text in splitter.split_text(file.read_text("utf-8"))]


def _join_texts(documents: Sequence[Any]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def _line(text: str) -> str:
    return " ".join(text.split())
