"""Train the reader's chunk adapter: with it a chunk is stored so that the reader, over it, says
what full prefill says.

It is `ragfuse adapt` on the questions that the reader was taught, in place of some made from
documents. Give the same command again to go on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ragfuse.adapt.examples import Example
from ragfuse.adapt.run import Adaptation
from ragfuse.settings import Settings
from ragfuse.types.keys import digest
from training.data import Examples, Source, split, squad, wikipedia

QUESTIONS = 10
"""Most questions of a context."""
MAX_WORDS = 1100
"""Most words of a context."""


class DrawnExamples:
    """The reader's examples by number."""

    def __init__(self, train: dict[str, list[Source]], wiki: list[Source], seed: int) -> None:
        self.train, self.wiki, self.seed = train, wiki, seed

    def example(self, number: int) -> Example:
        """Return the example of a number, of at least two passages."""
        drawn = Examples(self.train, self.wiki, f"{self.seed} {number}", MAX_WORDS)
        while True:
            example = drawn.draw(QUESTIONS)
            if len(example.passages) > 1:
                asked = tuple(each.question for each in example.questions)
                return Example(example.template, example.passages, asked)


def main() -> None:
    """Train for as long as was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-reader")
    parser.add_argument("--squad", type=Path, required=True, help="SQuAD 2.0 JSON.")
    parser.add_argument("--wikipedia", type=Path, required=True, help="JSONL of {title, text}.")
    parser.add_argument("--out", type=Path, required=True, help="Folder of the adapter.")
    parser.add_argument(
        "--minutes", type=float, default=60, help="The learning rate falls to 0 in them."
    )
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    train, held = split(squad(chosen.squad))
    wiki = wikipedia(chosen.wikipedia)
    source = digest(*(each.read_bytes() for each in (chosen.squad, chosen.wikipedia)))
    adaptation = Adaptation(Settings(model=chosen.model, threads=chosen.threads))
    examples = (
        DrawnExamples(train, wiki, chosen.seed).example,
        DrawnExamples(held, wiki, chosen.seed + 1).example,
    )
    trainer = adaptation.trainer(*examples, source, chosen.out, chosen.rank, seed=chosen.seed)

    def say(done: float) -> None:
        step, found = trainer.state.global_step, trainer.evaluations
        if step % 10 == 0:
            held_out = f"held-out KL {found[-1]['kl']:.4f} (was {found[0]['kl']:.4f})"
            print(f"step {step}, {held_out}: {done:.0%} done", flush=True)

    trainer.run(60 * chosen.minutes, report=say)
    print(
        f"{trainer.state.global_step} steps: "
        + ", ".join(f"{each['step']}: {each['kl']:.4f}" for each in trainer.evaluations)
    )
    adaptation.close()


if __name__ == "__main__":
    main()
