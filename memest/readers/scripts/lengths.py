"""How long samples are, as a script's tokenizer cuts and fills them."""

from __future__ import annotations

from memest.readers.scripts.calling import root_of
from memest.readers.scripts.document import CallDocument
from memest.readers.scripts.found import Found
from memest.readers.scripts.things import Call, Function, Unknown, Value
from memest.readers.values import Either, Saving

__all__ = ["put_lengths"]

_USUAL_MULTIPLE = 128
"""What rows are filled up to for the kernels' sake: no more than that is in any length."""
_MOST_STEPS = 500
"""Calls that are looked at, from a data set back to what it was made of."""
_TOKENIZERS = ("Tokenizer", "TokenizerFast", "Processor")


def put_lengths(document: CallDocument, found: Found) -> None:
    """Put down the length that samples are cut to, else the one that the tokenizer is made with."""
    calls = _of_samples(found)
    targets = [call for call in calls if "text_target" in call.keywords]
    inputs = [call for call in calls if call not in targets]
    for key, tokenizing in (("seq_len", inputs), ("target_len", targets)):
        given = [(call, call.argument(-1, "max_length")) for call in tokenizing]
        pairs = [(c, value) for c, value in given if value is not None and value.data is not None]
        known_pairs = [each for each in pairs if isinstance(each[1].data, int)]
        if known_pairs:
            call, value = max(known_pairs, key=lambda each: each[1].data)
            document.put(key, value, call.unconditional())
            padding = call.keywords.get("padding")
            if padding is not None and padding.data == "max_length":
                document.say("padded", True, call.line)
            lengths = sorted({value.data for _, value in known_pairs})
            if len(lengths) > 1:
                why = f"it is cut to {', '.join(map(str, lengths))} tokens: the most is priced"
                document.miss(call.line, "text", Saving(why))
        elif pairs:
            document.put(key, pairs[0][1], pairs[0][0].unconditional())
    if not any(call.argument(-1, "max_length") for call in inputs):
        _of_tokenizer(document, found)
    for call in found.calls:
        multiple = call.keywords.get("pad_to_multiple_of")
        size = None if multiple is None else multiple.data
        if isinstance(size, int) and size > _USUAL_MULTIPLE:
            why = f"rows are filled up to multiples of {size}: priced without; --seq-len says it"
            document.miss(call.line, "pad_to_multiple_of", Either(why))


def _of_samples(found: Found) -> list[Call]:
    """The calls of the tokenizer that make what is trained with.

    Those of the functions that the training data comes through, where that can be told; else all
    until the training ends that are no demonstration of one text.
    """
    calls = [call for call in found.calls if _tokenizes(call)]
    functions = _functions_of(found)
    own = [call for call in calls if not functions.isdisjoint(call.inside)]
    if own:
        return own
    early = found.early(tuple(calls))
    return [call for call in calls if call.handed or (call in early and not _is_literal(call))]


def _functions_of(found: Found) -> set[Function]:
    """Functions of the script that make samples of the data, or batches of samples."""
    if found.trainer is not None:
        names = ("train_dataset", "data_collator")
        values = [found.trainer.keywords.get(name) for name in names]
    else:
        loaders = [call.loaders[-1] for call in found.named("backward") if call.loaders][:1]
        pairs = ((0, "dataset"), (-1, "collate_fn"))
        values = [each.argument(at, name) for each in loaders for at, name in pairs]
    functions: set[Function] = set()
    queue = [value.data for value in values if value is not None]
    for _ in range(_MOST_STEPS):
        if not queue:
            break
        data = queue.pop()
        if isinstance(data, Function):
            functions.add(data)
        elif isinstance(data, Call):
            given = (*data.arguments, *data.keywords.values(), *data.attributes.values())
            queue += [data.receiver, *(value.data for value in given)]
    return functions


def _is_literal(call: Call) -> bool:
    """Whether it is made of texts that stand in the script, to show something."""
    text = call.arguments[0].data if call.arguments else None
    texts = text if isinstance(text, list) else [text]
    return bool(texts) and all(isinstance(each, str) for each in texts)


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
