"""What commands import, imported once, in the process that they are forked from."""

import gc
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO

from memest.cli.main import run

for name in ("memest.trace.session", "memest.search.advise", "memest.search.sweep"):
    import_module(name)
with redirect_stdout(StringIO()):  # what reading the words of a command needs
    run(["models", "gpt2"])
gc.collect()
gc.freeze()
