"""The command `fourfold` and its subcommands; `fourfold --help` lists them.

Every error that a user can cause is one line that names the cause; anything else is a bug and shows its traceback.
Options are parsed before torch is imported: help, and what is misspelt, come at once.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module

from fourfold import __version__
from fourfold.commands.completion import add_completion
from fourfold.commands.keeping import add_checkpoint, add_export, add_import
from fourfold.commands.parser import Help, Parser, below
from fourfold.commands.planning import add_calibrate, add_doctor, add_launch, add_plan
from fourfold.commands.running import add_data, add_demo, add_report, add_sample, add_train
from fourfold.environment import inside_a_job
from fourfold.errors import Failure, failure_of
from fourfold.train.process import INTERRUPTED, READABLE, ignore_signals

WAYS_OUT = {
    errno.ENOENT: "check the path, or make its folder first",
    errno.EACCES: "ask its owner, or give another path",
    errno.ENOSPC: "make room there, or give another path",
    errno.EDQUOT: "make room there, or give another path",
}
"""For files that the system refuses."""
TOP = """\
Train large models on a four-dimensional grid of devices."""
LEARN = """\
First:
  fourfold demo

`fourfold COMMAND --help` shows the options of a command, with examples.
The documentation begins at docs/index.md of the source."""


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(arguments)
    try:
        return command(options.run)(options, arguments)
    except KeyboardInterrupt:
        if not inside_a_job():
            print(f"fourfold: interrupted; {READABLE}", file=sys.stderr)
        return _leave(INTERRUPTED)
    except BrokenPipeError:
        return _leave(1)  # whoever read our output is gone
    except Exception as error:
        return _failed(error)


def command(run: str | Callable[..., int]) -> Callable[..., int]:
    """What a command does; where that is, as `train.plan:plan`, is imported now."""
    if not isinstance(run, str):
        return run
    module, _, name = run.partition(":")
    return getattr(import_module(f"fourfold.{module}"), name)


def _failed(error: Exception) -> int:
    """Say what went wrong, in a line where it is the user's to mend."""
    if inside_a_job():
        ignore_signals()  # who started this rank may tell it to end because another one has failed, too
    if "torch" not in sys.modules and isinstance(error, (ValueError, OSError, ImportError)):
        print(f"fourfold: error: {plain(error)}", file=sys.stderr)
        return 1
    import torch

    from fourfold.train.launch import report_failure

    failure = failure_of(error)
    if isinstance(error, torch.OutOfMemoryError):
        less = "policy.recompute=block, policy.loss_chunk, more batch.micro_steps, or a grid with a larger z"
        said = f"the device's memory does not suffice ({str(error).split('.')[0]}); {less} need less"
        report_failure(said, Failure.USER)
    elif failure is Failure.ERROR:
        report_failure("".join(traceback.format_exception(error)), failure)
    else:
        report_failure(plain(error), failure)
    return _leave(1)


def plain(error: Exception) -> str:
    """Without the number of an error of the system, and with a way out where nobody has given one."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if error.filename is None:
        return error.strerror
    return f"{error.filename}: {error.strerror}; {WAYS_OUT.get(error.errno or 0, 'give another path')}"


def _leave(code: int) -> int:
    """A rank that ends early must not wait for the others in the destructors of its process groups."""
    if inside_a_job():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def parser() -> argparse.ArgumentParser:
    """Commands in the order of a first day."""
    shape = Help
    top = Parser(prog="fourfold", description=TOP, epilog=LEARN, formatter_class=shape, add_help=False)
    commands = below(top)
    add_demo(commands, shape)
    add_plan(commands, shape)
    add_train(commands, shape)
    add_report(commands, shape)
    add_sample(commands, shape)
    add_data(commands, shape)
    add_checkpoint(commands, shape)
    add_import(commands, shape)
    add_export(commands, shape)
    add_calibrate(commands, shape)
    add_launch(commands, shape)
    add_doctor(commands, shape)
    add_completion(commands, shape, parser)
    more = top.add_argument_group("options")
    more.add_argument("-h", "--help", action="help", help="show this help and exit")
    more.add_argument(
        "--version", action="version", version=f"fourfold {__version__}", help="show the version and exit"
    )
    return top


if __name__ == "__main__":
    sys.exit(main())
