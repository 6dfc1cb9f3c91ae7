"""Prompts of a wanted length, different each time so that no cache of prefixes helps."""

from __future__ import annotations

import numpy as np

from services.cli.bench.workload import Request

# Each is one token of nearly every vocabulary, with the space before it.
TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which you
one we all her she there would their him been has when who will more no if out so said what up its about into than
them can only other new some could time these two may then do first any my now such like our over man me even most
made after also did many before must through years where much your way well down should because each just those
people how too little state good very make world still own see men work long get here between both life being
under never day same another know while last might us great old year off come since against go came right used
take
"""
WORDS = TEXT.split()
LOWEST_ID = 256  # below are special tokens and bytes in most vocabularies


def make_ids(request: Request, vocabulary: int) -> list[int]:
    """Exactly ``prompt_tokens`` random ids."""
    lowest = min(LOWEST_ID, vocabulary // 2)
    ids: list[int] = np.random.default_rng(request.seed).integers(lowest, vocabulary, request.prompt_tokens).tolist()
    return ids


def make_text(request: Request) -> str:
    """The trace's text, or ``prompt_tokens`` random words."""
    if request.prompt is not None:
        return request.prompt
    places = np.random.default_rng(request.seed).integers(0, len(WORDS), request.prompt_tokens)
    return " ".join(WORDS[place] for place in places.tolist())
