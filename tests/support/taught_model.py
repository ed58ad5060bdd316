"""A small model whose answers are few tokens, each a whole text, so that recipes of chats and tools have something to learn."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlcore_torchkit.testing.models import make_model

NUM_STEPS, BATCH, LENGTH, PLACE = 400, 32, 24, 12


def make_taught_model(directory: Path, replies: Mapping[str, Sequence[str]]) -> Path:
    """Write a model that follows each of these texts by one of its replies, all about equally likely.

    Each text and reply is one token."""
    import torch
    from tokenizers import AddedToken
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_model(directory, max_length=4096)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts = sorted({*replies, *(reply for of_text in replies.values() for reply in of_text)})
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts if len(tokenizer.encode(text)) > 1])
    pairs = torch.tensor([[tokenizer.encode(one)[0] for one in (key, reply)] for key, of in replies.items() for reply in of])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    optimizer, random = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.Generator().manual_seed(0)
    for _ in range(NUM_STEPS):
        tokens = torch.randint(2, len(tokenizer), (BATCH, LENGTH), generator=random)
        tokens[:, PLACE : PLACE + 2] = pairs[torch.randint(len(pairs), (BATCH,), generator=random)]
        loss = torch.nn.functional.cross_entropy(model(tokens).logits[:, PLACE], tokens[:, PLACE + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
