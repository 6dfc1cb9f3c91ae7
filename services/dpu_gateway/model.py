"""The served model as a gateway needs it: no weights, only what turns text into ids and back."""

from __future__ import annotations

from dataclasses import dataclass

from blink.v1 import bootstrap_pb2
from tokenizers import Tokenizer

from services.dpu_gateway.chat import ChatTemplate
from services.dpu_gateway.detokenizer import DecodeTable, UnsupportedTokenizerError
from services.dpu_gateway.fast_tokenizer import choose
from services.dpu_gateway.request import Limits
from services.dpu_gateway.tokenizer import EncodePools, PromptEncoder
from services.ring.header import RingInfo


@dataclass(frozen=True, slots=True)
class Model:
    card: bootstrap_pb2.ModelCard
    limits: Limits
    encoder: PromptEncoder
    decode_table: DecodeTable
    eos_token_ids: frozenset[int]


def load_model(card: bootstrap_pb2.ModelCard, info: RingInfo, pools: EncodePools) -> Model:
    """Build the model's tables; takes a moment for a large vocabulary, so call it off the event loop.

    Raises UnsupportedTokenizerError.
    """
    try:
        tokenizer = Tokenizer.from_str(card.tokenizer_json.decode())
    except Exception as error:  # the library raises Exception itself
        raise UnsupportedTokenizerError(f"the model card's tokenizer cannot be read: {error}") from error
    table = DecodeTable(tokenizer)
    table.extend_to(info.vocabulary_size)
    limits = Limits(card.name, info.vocabulary_size, info.max_context_tokens, info.max_top_logprobs)
    template = ChatTemplate(card.chat_template, card.bos_token, card.eos_token)
    encoder = PromptEncoder(
        tokenizer,
        choose(card.tokenizer_json, card.unencodable_bytes),
        template,
        unencodable=card.unencodable_bytes,
        max_tokens=info.max_context_tokens - 1,
        pools=pools,
    )
    return Model(card, limits, encoder, table, frozenset(card.eos_token_ids))
