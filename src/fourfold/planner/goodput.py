"""Goodput: the share of a run's time that ends up in the model, when devices fail and checkpoints are saved.

Failures come at random, at a constant rate for each device (exponential times between them). A failure of any device
ends the step of all; the run then restarts from the newest checkpoint that is complete. A save stops training only
until the state is copied, and is complete a while later, when it is written (`checkpoint.save`). So an interval of T
seconds of training costs, with M seconds between failures of the job, R seconds for a restart, C seconds that a save
stops training, and W seconds from then until it is complete,

    E(T) = M exp((R + W) / M) (exp((T + C) / M) - 1)                                             (G1)

seconds on average, for W <= T. It is exact, and follows from two facts. Between two moments at which a checkpoint
becomes complete lie T + C seconds if nothing fails. If something fails after t of them, the run restarts, and must get
through R + W + T + C seconds without a failure, since the W seconds of training behind the older checkpoint are gone
too; with every failure it begins again, so that this takes M (exp((R + W + T + C) / M) - 1) on average. Goodput is
T / E(T). It is the largest where

    (1 - T/M) exp((T + C) / M) = 1                                                               (G2)

whatever R and W are. Young's sqrt(2 C M) is its first term (CACM 17 (1974), 530), Daly's formula has the next ones
(FGCS 22 (2006), 303); Newton's method solves it as it is. E(T) is Vaidya's for checkpoints that are written while the
run goes on (IEEE Transactions on Computers 46 (1997), 942).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, sqrt

from fourfold.errors import NoPlanError

DEVICE_HOURS = 50_000.0
"""Hours between two failures of one device, with all that belongs to it: Llama 3 was interrupted 419 times in 54 days
on 16,384 GPUs, which is once in 50,700 device-hours (arXiv 2407.21783, section 3.3.4)."""
RESTART_SECONDS = 600.0
"""Seconds from a failure until training continues: an estimate. Llama 3 trained for more than 90% of the time, and was
interrupted every 3.1 hours (the same section), so an interruption cost at most 18 minutes with all repeated steps."""
STATE_BYTES = 12
"""Bytes of a checkpoint per parameter: the weight and AdamW's two moments in fp32."""
COPY_BYTES_PER_SECOND = 5e9
"""The speed at which a device copies its part of the state to the host: an estimate. One H200 alone reached 55 GB/s,
but the devices of a node share the host's memory. Training waits for all of the copy if steps are recorded, else at the
optimizer's step; it counts as if training always waited for all of it."""
AGREE_SECONDS = 1.0
"""Seconds that a save stops training besides the copy, in which ranks compare replicas and agree on what they write: an
estimate; two ranks on a CPU took 0.3 (benchmarks/results/2026-11-15-checkpoint.md)."""
STORAGE_BYTES_PER_SECOND = 2e12 / 16_384
"""The speed at which a device writes its part of a checkpoint: 122 MB/s, since Llama 3's storage took 2 TB/s from
16,384 GPUs (section 3.3.1)."""
MOST_SECONDS = 1800.0
"""The longest interval that is recommended, although small jobs would lose less time with a longer one: nobody wants to
lose more than half an hour at once, and the goodput differs by a tenth of a percent."""
LEAST_GOODPUT = 0.01
"""The goodput below which a run is said to make no progress."""


@dataclass(frozen=True, slots=True)
class FailureRates:
    """What is known or assumed about failures, restarts and saves, for any number of devices.

    The two values that are None by default follow from the size of the model and the number of devices.
    """

    device_hours: float = DEVICE_HOURS
    """Mean hours between two failures of one device, with its share of the host, the network and everything else."""
    restart_seconds: float = RESTART_SECONDS
    """Seconds from a failure until training continues: to notice it, start again and load the checkpoint."""
    stop_seconds: float | None = None
    """Seconds for which one save stops training; by default the copy to the host and `AGREE_SECONDS`."""
    storage_bytes_per_second: float | None = None
    """Bytes per second that all devices together write to storage; by default `STORAGE_BYTES_PER_SECOND` for each."""

    def job(self, parameters: int, devices: int) -> Interruptions:
        """Return how a job that trains all of so many parameters on so many devices is interrupted."""
        whole = STATE_BYTES * parameters
        stop, together = self.stop_seconds, self.storage_bytes_per_second
        return Interruptions(
            between_failures=3600 * self.device_hours / devices,
            restart=self.restart_seconds,
            stop=AGREE_SECONDS + whole / devices / COPY_BYTES_PER_SECOND if stop is None else stop,
            write=whole / (devices * STORAGE_BYTES_PER_SECOND if together is None else together),
            checkpoint_bytes=whole,
        )

    @property
    def assumptions(self) -> list[str]:
        """What is given or assumed, in words, with the options of `fourfold plan` that change it."""
        published = ", the rate of Llama 3 405B, 419 interruptions in 54 days on 16,384 GPUs"
        stop, together = self.stop_seconds, self.storage_bytes_per_second
        copy = (
            f"{AGREE_SECONDS:g} s and the copy of a device's part to its host at {COPY_BYTES_PER_SECOND / 1e9:g} GB/s"
        )
        each = f"{STORAGE_BYTES_PER_SECOND / 1e9:.2f} GB/s for each device"
        return [
            f"a device fails once in {self.device_hours:,.0f} hours on average (--mtbf"
            f"{published if self.device_hours == DEVICE_HOURS else ''})",
            f"{self.restart_seconds:,.0f} s pass from a failure until training continues (--restart)",
            f"a save stops training for {copy if stop is None else f'{stop:g} s'} (--checkpoint)",
            f"{STATE_BYTES} bytes per parameter, fp32 weights and AdamW's moments, are then written at "
            f"{each if together is None else f'{together / 1e9:g} GB/s'} (--storage) while training goes on",
        ]


@dataclass(frozen=True, slots=True)
class Interruptions:
    """How often a job fails and what a restart and a save cost it; all times are seconds."""

    between_failures: float
    """Mean time between two failures of the job: M."""
    restart: float
    """Time from a failure until training continues: R."""
    stop: float
    """Time for which one save stops training: C."""
    write: float
    """Time from then until the checkpoint is complete, while training goes on: W."""
    checkpoint_bytes: int
    """Bytes of one checkpoint, over all devices."""

    def goodput(self, interval: float) -> float:
        """Return the share of the time that is neither stopped, restarting nor repeated, T / E(T) of equation G1.

        `interval` is the seconds of training between two saves. They begin one after the other: if the interval is
        shorter than a checkpoint takes to be written, training waits for the rest.
        """
        mean = self.between_failures
        stop = self.stop + max(0.0, self.write - interval)
        if (self.restart + self.write + interval + stop) / mean > 500:  # exp would overflow soon
            return 0.0
        return interval / (mean * exp((self.restart + self.write) / mean) * expm1((interval + stop) / mean))

    @property
    def optimum(self) -> float:
        """The seconds of training between two saves with the most goodput: equation G2, but no less than a write."""
        mean, stop = self.between_failures, self.stop / self.between_failures
        # The root of u - 1 + exp(-u - stop), which is convex and rises: from above, Newton's steps never pass it.
        u = min(1.0, sqrt(2 * stop))
        for _ in range(60):
            if u + stop == 0:
                break  # a save costs nothing, so the run saves all the time
            step = (u + expm1(-u - stop)) / -expm1(-u - stop)
            u -= step
            if abs(step) <= 1e-12 * u:
                break
        return max(u * mean, self.write)

    @property
    def recommended(self) -> float:
        """The seconds of training between two saves that a plan recommends: the optimum, up to half an hour."""
        return max(min(self.optimum, MOST_SECONDS), self.write)

    def plan(self, step_seconds: float) -> dict[str, float]:
        """Return the recommended interval in seconds and in whole steps of this length, and the goodput with it.

        The result is a part of the plan's document.
        """
        steps = max(1, round(self.recommended / step_seconds))
        goodput = self.goodput(steps * step_seconds)
        self._require(goodput)
        return {"goodput": goodput, "interval_seconds": steps * step_seconds, "interval_steps": steps}

    def require_progress(self) -> None:
        """Raise if the job makes no progress however fast its steps are; `plan` knows the rest."""
        # a save that costs nothing has no best interval: the shorter, the better, and in the end only restarts count
        self._require(self.goodput(self.optimum) if self.optimum else exp(-self.restart / self.between_failures))

    def _require(self, goodput: float) -> None:
        if goodput < LEAST_GOODPUT:
            mean = f"{self.between_failures:,.0f}" if self.between_failures >= 10 else f"{self.between_failures:.2g}"
            raise NoPlanError(
                f"a job on so many devices fails every {mean} s, a restart takes "
                f"{self.restart:,.0f} s and a checkpoint {self.stop + self.write:,.0f} s: it would make no progress; "
                "take fewer devices, or other --mtbf, --restart and --storage",
                "fails too often",
            )

    def document(self) -> dict[str, float]:
        """Return the numbers and the best interval, as a part of the plan's document."""
        return {
            "between_failures_seconds": self.between_failures,
            "restart_seconds": self.restart,
            "stop_seconds": self.stop,
            "write_seconds": self.write,
            "checkpoint_bytes": self.checkpoint_bytes,
            "optimum_seconds": self.optimum,
            "recommended_seconds": self.recommended,
        }
