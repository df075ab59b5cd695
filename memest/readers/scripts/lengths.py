"""How long samples are, as a script's tokenizer cuts and fills them."""

from __future__ import annotations

from memest.readers.scripts.calling import root_of
from memest.readers.scripts.document import CallDocument
from memest.readers.scripts.found import Found
from memest.readers.scripts.things import Call, Unknown, Value
from memest.readers.values import Either

__all__ = ["put_lengths"]

_USUAL_MULTIPLE = 128
"""What rows are filled up to for the kernels' sake: no more than that is in any length."""
_TOKENIZERS = ("Tokenizer", "TokenizerFast", "Processor")


def put_lengths(document: CallDocument, found: Found) -> None:
    """Put down the length that the tokenizer is called with, else the one that it is made with."""
    lengths = [
        (call, value)
        for call in found.calls
        if _tokenizes(call)
        for value in [call.argument(-1, "max_length")]
        if value is not None and value.data is not None
    ]
    inputs = [each for each in lengths if "text_target" not in each[0].keywords]
    targets = [each for each in lengths if "text_target" in each[0].keywords]
    for key, pairs in (("seq_len", inputs), ("target_len", targets)):
        known_pairs = [each for each in pairs if isinstance(each[1].data, int)]
        if known_pairs:
            call, value = max(known_pairs, key=lambda each: each[1].data)
            document.put(key, value, call.unconditional())
            padding = call.keywords.get("padding")
            if padding is not None and padding.data == "max_length":
                document.say("padded", True, call.line)
        elif pairs:
            document.put(key, pairs[0][1], pairs[0][0].unconditional())
    if not inputs:
        _of_tokenizer(document, found)
    for call in found.calls:
        multiple = call.keywords.get("pad_to_multiple_of")
        size = None if multiple is None else multiple.data
        if isinstance(size, int) and size > _USUAL_MULTIPLE:
            why = f"rows are filled up to multiples of {size}: priced without; --seq-len says it"
            document.miss(call.line, "pad_to_multiple_of", Either(why))


def _of_tokenizer(document: CallDocument, found: Found) -> None:
    for call in found.calls:
        value: Value | None = None
        if call.name == "from_pretrained" and call.maker.endswith(_TOKENIZERS):
            value = call.keywords.get("model_max_length")
        elif call.path == "=model_max_length":
            value = call.arguments[0]
        elif call.name == "ConstantLengthDataset":
            value = call.keywords.get("seq_length")
        if value is not None and isinstance(value.data, int):
            document.put("seq_len", value, call.unconditional())


def _tokenizes(call: Call) -> bool:
    """Whether a call cuts text into tokens."""
    if call.path in ("()", "encode_plus", "batch_encode_plus", "__call__"):
        root = root_of(call.receiver)
        if isinstance(root, Call):
            return root.name == "from_pretrained" and root.maker.endswith(_TOKENIZERS)
        return isinstance(root, Unknown) and "tokenizer" in root.why
    if call.path == "pad" or call.name.startswith("DataCollator"):
        return True
    words = call.path.lower()
    return words.startswith("?.") and words.endswith(("tokenizer", "processor"))
