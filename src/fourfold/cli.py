"""The command `fourfold` and its subcommands; `fourfold --help` lists them.

An error that a user can cause is printed as one line that names the cause. Any other error is a bug and is printed with
its traceback. Options are parsed before torch is imported, so that help and misspelled options are answered at once.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from math import prod
from pathlib import Path
from typing import NoReturn

from fourfold.commands.options import parser
from fourfold.environment import end_with_launcher, inside_a_job, is_watched, started_by_torchrun
from fourfold.errors import FailedElsewhereError, Failure, LostReaderError, failure_of, readable, shortened
from fourfold.train import fork_server
from fourfold.train.console import drain_output, unblocked_output
from fourfold.train.signals import INTERRUPTED, READABLE, ignore_signals

STARTING = "starting: imports torch"
"""The first line of a run, which appears while nothing else can be known yet."""
TRAIN = "train:train"
"""The command whose output for people must not end it, nor make it wait."""
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
"""The files by which Linux shows that it has GPUs, of NVIDIA and of AMD: then ranks are started without any option."""
WAYS_OUT = {
    errno.ENOENT: "check the path, or make its folder first",
    errno.EACCES: "ask its owner, or give another path",
    errno.ENOSPC: "make room there, or give another path",
    errno.EDQUOT: "make room there, or give another path",
}
"""What to do about an error of the operating system that names a file, by its number."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name and return its exit code."""
    if started_by_torchrun():
        end_with_launcher()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(arguments)  # exits with code 2 if the arguments are wrong
    trains = options.run == TRAIN
    launches = trains and not inside_a_job()
    if launches and may_start_ranks(options):
        forked = fork_server.begin(module_of(options.run))
        if forked is not None:
            _be_rank(forked)
    # before torch is imported, because its log handlers keep the stream that they find
    with unblocked_output() if trains else nullcontext():
        if launches:
            starting(options)
        try:
            return _run(options, arguments, trains=trains)
        finally:
            fork_server.close()


def _be_rank(arguments: Sequence[str]) -> NoReturn:
    """Run the command as a forked rank and end this process, whose caller's program goes on in the launcher alone."""
    code = 1
    try:
        code = main(arguments)
    except SystemExit as ended:  # options that make no sense
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # a bug; what called us must not see it
        traceback.print_exc()
    atexit._run_exitfuncs()  # what the interpreter would do, for packages that finish their work at the end
    drain_output()
    os._exit(code)


def _run(options: argparse.Namespace, arguments: Sequence[str], *, trains: bool) -> int:
    """Run the command, report how it failed, and return the exit code."""
    try:
        return command(options.run)(options, arguments)
    except KeyboardInterrupt as interrupt:
        if not inside_a_job():
            print(f"fourfold: interrupted; {str(interrupt) or READABLE}", file=sys.stderr)
        return _leave(INTERRUPTED)
    except BrokenPipeError as error:
        # The reader of our output, such as `head`, has exited: no reason for words. While a run trains, printing does
        # not raise this, so unless its data has lost its reader, this is the error of something else.
        if trains and not isinstance(error, LostReaderError):
            return _failed(error)
        return _unread(error) if is_watched() else _leave(1)
    except Exception as error:
        return _failed(error)


def starting(options: argparse.Namespace) -> None:
    """Tell people that something happens: importing torch takes seconds."""
    if not options.print_config:
        print(STARTING, file=sys.stderr if options.json == "-" else sys.stdout, flush=True)


def may_start_ranks(options: argparse.Namespace) -> bool:
    """Return whether the command may start several ranks here, as far as its options and the machine say."""
    if options.print_config or options.ranks == 1:
        return False
    if options.grid:
        return prod(options.grid.values()) > 1
    given = options.ranks, options.config, options.resume
    return any(each is not None for each in given) or any(Path(device).exists() for device in GPU_DEVICES)


def module_of(run: str) -> str:
    """Return the module of a command that is named `module:function`, as in `plan:plan`."""
    return f"fourfold.commands.{run.partition(':')[0]}"


def command(run: str) -> Callable[..., int]:
    """Import and return the body of a command."""
    return getattr(import_module(module_of(run)), run.partition(":")[2])


def _failed(error: Exception) -> int:
    """Report an error, in one line if the user can fix it, and return the exit code."""
    if inside_a_job():
        ignore_signals()  # the launcher may send SIGTERM because another rank has failed; report our error first
    # a command that failed before it needed torch: importing torch only to report the error would take seconds
    if "torch" not in sys.modules and isinstance(error, (ValueError, OSError, ImportError)):
        print(f"fourfold: error: {plain(error)}", file=sys.stderr)
        return 1
    import torch

    from fourfold.job import reporting
    from fourfold.policy import LESS_MEMORY
    from fourfold.train.launch import report_failure
    from fourfold.watch.memory import LESS_ON_HOST, HostMemory

    failure, said = failure_of(error), plain(error)
    # the cause too: an error of a save or of a checkpoint may only pass on what another rank has said
    elsewhere = any(isinstance(each, FailedElsewhereError) for each in (error, error.__cause__))
    if isinstance(error, torch.OutOfMemoryError):
        failure = Failure.USER
        said = f"the device is out of memory ({said.split('.')[0]}); to use less: {LESS_MEMORY}"
    elif failure is Failure.OUT_OF_MEMORY:
        why = said.partition("\n")[0] or type(error).__name__
        said = f"the machine is out of memory ({why}); {HostMemory.read()}; to use less: {LESS_ON_HOST}"
    elif failure is Failure.ERROR and not elsewhere:
        said = "".join(traceback.format_exception(error))
    # to our launcher every rank tells all
    with nullcontext(True) if is_watched() else reporting(plain(error)) as whole:
        report_failure(said, failure, elsewhere=elsewhere, whole=whole)
    return _leave(1)


def _unread(error: BrokenPipeError) -> int:
    """Tell our launcher that the data of this rank has lost its reader, which no restart would change."""
    ignore_signals()  # as in `_failed`
    from fourfold.train.launch import report_failure

    report_failure(plain(error), Failure.USER)
    return _leave(1)


def plain(error: Exception) -> str:
    """Return the message of an error; for an error of the operating system, replace its number by a way out.

    A message may repeat a key or a name of any size from a file, so it is shortened here, for all errors alike.
    """
    if not isinstance(error, OSError) or error.strerror is None:
        return readable(str(error))
    if error.filename is None:
        return error.strerror
    return f"{shortened(str(error.filename))}: {error.strerror}; {WAYS_OUT.get(error.errno or 0, 'give another path')}"


def _leave(code: int) -> int:
    """Return the exit code; a rank of a job exits here, because its process groups would wait for other ranks."""
    if inside_a_job():
        drain_output()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
