"""The question that the tests of this folder ask, and a disk without room for the answer."""

MODEL = "prajjwal1/bert-tiny"
QUESTION = (MODEL, "--batch", "4", "--seq-len", "64")


def fill(place):
    """Take what room a disk has left."""
    file = (place / "full").open("wb", buffering=0)
    with file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            return
