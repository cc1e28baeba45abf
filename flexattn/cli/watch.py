"""The progress of long work on stderr: problem, stage, current config, best time so far."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress as Bars,
    TextColumn,
    TimeRemainingColumn,
)

from flexattn.cli.terminal import tell
from flexattn.measure.process import Closing
from flexattn.tuning.evaluator import Progress
from flexattn.util.text import one_line


class Watch(Closing):
    """Bars over many problems with the time left; lines alone where nobody watches."""

    def __init__(self, problems: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars = Bars(
            TextColumn("{task.description:<10.10}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._bars.start()
        self._problems = self._bars.add_task("problems", total=problems, text="")

    @property
    def bars(self) -> bool:
        """True on a terminal; without one there are lines alone."""
        return self._console.is_terminal

    def close(self) -> None:
        """Take the bars away; the lines stay."""
        self._bars.stop()

    def lane(self) -> Lane:
        """A line of its own for one worker."""
        return Lane(self._bars, self._console)

    def finished(self, line: str, counts: bool = True) -> None:
        """A problem is done; `line` stays. counts: it was among those that had to be tuned."""
        self._bars.advance(self._problems, int(counts))
        self.say(line)

    def say(self, line: str) -> None:
        """A line that stays."""
        tell(self._console, line)


class Lane(Progress):
    """One worker's problem, stage and best time."""

    def __init__(self, bars: Bars, console: Console) -> None:
        self._bars, self._console = bars, console
        self._bar = bars.add_task("", total=None, text="", visible=False)
        self._title = ""
        self._best: float | None = None

    def problem(self, title: str) -> None:
        """As Progress.problem."""
        self._title, self._best = one_line(title), None
        self._bars.reset(
            self._bar, total=None, description="start", text=self._title, visible=True
        )

    def stage(self, name: str, total: int) -> None:
        """As Progress.stage."""
        self._bars.reset(self._bar, total=total or None, description=name, text=self._title)

    def step(self, text: str, best_us: float | None = None) -> None:
        """As Progress.step."""
        self._best = best_us if best_us is not None else self._best
        best = "" if self._best is None else f"  best {self._best:.1f} µs"
        self._bars.update(self._bar, advance=1, text=f"{self._title}{best}  {one_line(text)}")

    def note(self, text: str) -> None:
        """As Progress.note."""
        tell(self._console, f"{self._title}: {text}")
