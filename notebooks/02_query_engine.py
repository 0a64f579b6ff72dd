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
# # A LlamaIndex query engine over a KV store
#
# `RagFuseLLM` takes the place of the LLM in any LlamaIndex query engine. Nodes are encoded once, when they are
# ingested; at question time their KV comes from the store (`pip install 'ragfuse-kv[llama-index]'
# llama-index-llms-ragfuse`).

# %%
import logging as plain_logging
import shutil
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
from llama_index.core import Document, PromptTemplate, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.llms.ragfuse import KVPrecompute, RagFuseLLM, RagFuseSynthesizer
from transformers.utils import logging

from ragfuse import Settings
from ragfuse.demo import corpus_path
from ragfuse.models import resolve_embedder

logging.disable_progress_bar()
plain_logging.getLogger("llama_index").setLevel(plain_logging.ERROR)
folder = Path(tempfile.mkdtemp())  # a store of this notebook's own, removed at its end
llm = RagFuseLLM(max_tokens=24, settings=Settings(store=folder))
embedder = HuggingFaceEmbedding(
    model_name=str(resolve_embedder("minilm-l6", Settings().home)), device="cpu"
)

# %% [markdown]
# ## Ingest: one step more
#
# `KVPrecompute` is the last step of the pipeline. It computes the KV of every node, as the text that the node will be
# in a prompt.

# %%
text = (corpus_path() / "1973-oil-crisis.md").read_text(encoding="utf-8").rsplit("\n\n", 12)[0]
pipeline = IngestionPipeline(
    transformations=[SentenceSplitter(chunk_size=200, chunk_overlap=0), KVPrecompute(llm)],
    disable_cache=True,
)
began = time.perf_counter()
nodes = pipeline.run(documents=[Document(text=text, id_="oil")])
print(f"{len(nodes)} nodes split and encoded in {time.perf_counter() - began:.0f} s")
print(f"Again, everything is there: {KVPrecompute(llm).ensure(nodes).encoded} encoded")

# %% [markdown]
# ## Ask
#
# The index and the query engine are LlamaIndex's own.

# %%
index = VectorStoreIndex(nodes, embed_model=embedder)
template = PromptTemplate(
    "Use the following passages to answer the question at the end in a few words.\n\n{context_str}\n\n"
    "Question: {query_str}\nAnswer:"
)
engine = index.as_query_engine(llm=llm, similarity_top_k=5, text_qa_template=template)
question = "On which holiday was Israel attacked?"
response = engine.query(question)
print(response)
for source in response.source_nodes:
    print(f"  {source.score:.2f}  {' '.join(source.node.get_content().split())[:80]} ...")

# %% [markdown]
# ## What a question costs
#
# The same chat, with the store and without it (`reuse=False` is the model's own full prefill). The trace is in
# `response.raw["ragfuse"]`, the token counts in `response.raw["usage"]`, where LlamaIndex's token counter looks.

# %%
questions = [
    question,
    "How much did Saudi Arabia spend to spread Wahhabism?",
]


def chat(question, **options):
    found = engine.retrieve(question)
    context = "\n\n".join(each.node.get_content() for each in found)
    return llm.chat(template.format_messages(context_str=context, query_str=question), **options)


chat(question), chat(question, reuse=False)
seen = {"full prefill": [], "ragfuse": []}
for each in questions:
    print(each)
    for name, options in (("full prefill", {"reuse": False}), ("ragfuse", {})):
        said = chat(each, **options)
        trace = said.raw["ragfuse"]
        seen[name].append(trace["ttft_s"])
        reused = f"{trace['tokens_reused']:4} of {trace['tokens']} tokens reused"
        print(f"  {name:13} {trace['ttft_s']:5.2f} s, {reused}: {said.message.content.strip()}")
print(said.raw["usage"])

# %%
figure, axes = plt.subplots(figsize=(8, 2.4), layout="constrained")
for shift, color, (name, times) in zip(
    (0.2, -0.2), ("tab:grey", "tab:orange"), seen.items(), strict=True
):
    bars = axes.barh(
        [row + shift for row in range(len(times))], times, 0.38, color=color, label=name
    )
    axes.bar_label(bars, fmt="%.2f s", padding=3, fontsize=8)
axes.set_yticks(range(len(questions)), questions, fontsize=8)
axes.invert_yaxis()
axes.margins(x=0.2)
axes.set_xlabel("seconds to the first token")
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## Modes
#
# `compact`, `refine` and `tree_summarize` may split or join nodes. `RagFuseSynthesizer` puts whole nodes into a prompt.

# %%
ways = {mode: {"response_mode": mode} for mode in ("compact", "refine", "tree_summarize")}
ways["RagFuseSynthesizer"] = {
    "response_synthesizer": RagFuseSynthesizer(llm, text_qa_template=template)
}
own = {"text_qa_template": template, "summary_template": template}
for name, options in ways.items():
    asked = index.as_query_engine(llm=llm, similarity_top_k=5, **own, **options)
    began = time.perf_counter()
    answer = str(asked.query(question)).strip()
    print(f"{name:18} {time.perf_counter() - began:5.2f} s in all  {answer[:70]}")

# %% [markdown]
# ## Streaming

# %%
streaming = index.as_query_engine(
    llm=llm, similarity_top_k=5, text_qa_template=template, streaming=True
)
for word in streaming.query(questions[1]).response_gen:
    print(word, end="|")

# %%
llm.get_engine().close()
shutil.rmtree(folder)
