"""All interleavings of a few threads, one after another, by depth-first search.

A :class:`Scheduler` stands for the module ``threading`` in the code under test. Its
threads are real ones, but only the one that holds the baton runs: at each *point* (a
lock is to be taken, a wait begins, an event is set, a thread is started or joined,
:meth:`Scheduler.point` is called) it decides who goes on. So a run is told by its
decisions alone, and :func:`explore` makes them all, up to a number of preemptions: of
decisions that take the baton from a thread that could have gone on.

What is between two points runs undisturbed, so a run shows what comes of the order of
the points, not of two threads inside one line.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from dataclasses import dataclass

EXAMPLES = int(os.environ.get("BRAINSTORM_DBUF_TEST_EXAMPLES", "25"))


class Deadlock(AssertionError):
    """Nobody can go on."""


class Abandoned(BaseException):
    """The run is over: leave, whatever you are doing."""


@dataclass
class Decision:
    """One that had alternatives: how many, which was taken, what another one costs."""

    options: int
    taken: int
    costs: tuple[int, ...]


class Scheduler:
    """One run, and what stands for ``threading`` in it.

    Args:
        plan: what to decide, by number; after its end whoever runs goes on.
        timeouts: when a wait with a time limit runs out of it: "never"; "last", once
            nobody else can go on; or "any" time, at the price of a preemption.
        silent: names of functions whose notifications are lost.
        interrupt: at which of its points the first thread gets a KeyboardInterrupt, if
            not within a function called ``close``, whose points do not count.
    """

    def __init__(self, plan=(), timeouts="never", silent=(), interrupt=None):
        self.timeouts = timeouts
        self.interrupt = interrupt
        self.silent = silent
        self.plan = plan
        self.decisions = []
        self.trace = []
        self.threads = [Task(self, "trainer")]
        self.running = self.threads[0]
        self.abandoned = None

    def Condition(self):
        return Condition(self)

    def Event(self):
        return Event(self)

    def Thread(self, target, args=(), name=None, daemon=None):
        return Thread(self, target, args, name, daemon)

    def point(self, what, is_ready=None, timed=False):
        """Let somebody go on; return, once that is this thread, whether in time.

        Args:
            what: for the trace.
            is_ready: whether this thread can go on; always, if None.
            timed: it may go on by a time limit too.
        """
        if self.abandoned is not None:
            raise Abandoned
        task = self.running
        assert task.ident == threading.get_ident(), "a thread outside of the schedule"
        self.trace.append(f"{task.name}: {what}")
        if self.interrupt is not None and task is self.threads[0]:
            if not _is_within("close"):
                self.interrupt -= 1
                if self.interrupt < 0:
                    self.interrupt = None
                    raise KeyboardInterrupt
        task.what, task.is_ready, task.timed = what, is_ready, timed
        self._pass_on(task)
        task.is_ready = None
        return task.in_time

    def _pass_on(self, task):
        """Decide who goes on, and wait until that is ``task``, if it has not ended."""
        can = [other for other in self.threads if other.can_go_on()]
        # Who runs goes on by default; the others in the order of their start.
        can.sort(key=lambda other: other is not task)
        options = [(other, True) for other in can]
        costs = [int(can[0] is task and other is not task) for other in can]
        if self.timeouts == "any" or (self.timeouts == "last" and not can):
            late = [t for t in self.threads if t.timed and not t.is_over]
            options += [(other, False) for other in late if other not in can]
            costs += [int(bool(can))] * (len(options) - len(costs))
        if not options:
            if task.is_over and all(other.is_over for other in self.threads):
                return
            self._abandon(Deadlock(self._who_waits()))
            if task.is_over:
                return
            raise Abandoned
        taken = 0
        if len(options) > 1:
            number = len(self.decisions)
            taken = self.plan[number] if number < len(self.plan) else 0
            self.decisions.append(Decision(len(options), taken, tuple(costs)))
        chosen, chosen.in_time = options[taken]
        chosen.timed = False
        self.running = chosen
        if chosen is not task:
            chosen.baton.release()
            if not task.is_over:
                task.baton.acquire()
                if self.abandoned is not None:
                    raise Abandoned

    def _who_waits(self):
        waiting = [f"{t.name} at {t.what}" for t in self.threads if not t.is_over]
        steps = "\n  ".join(self.trace)
        return f"nobody can go on: {', '.join(waiting)}\n  {steps}"

    def _abandon(self, reason):
        self.abandoned = self.abandoned or reason
        for other in self.threads:
            if other is not self.running:
                other.baton.release()

    def finish(self, error):
        """End the run of the first thread; return its error, a deadlock before it."""
        first = self.threads[0]
        first.is_over = True
        if self.abandoned is None:
            if error is not None and not isinstance(error, Abandoned):
                self._abandon(error)
            else:
                # The others run to their ends.
                self._pass_on(first)
        for task in self.threads[1:]:
            task.real.join(20)
            assert not task.real.is_alive(), "a thread hangs outside of the schedule"
        for task in self.threads[1:]:
            if task.error is not None and self.abandoned is None:
                self.abandoned = task.error
        return self.abandoned


class Task:
    """A thread of the schedule."""

    def __init__(self, scheduler, name):
        self.name = name
        self.baton = threading.Semaphore(0)
        self.ident = threading.get_ident()
        self.what = "its start"
        self.is_ready = None
        self.timed = False
        self.in_time = True
        self.is_over = False
        self.error = None
        self.real = None

    def can_go_on(self):
        return not self.is_over and (self.is_ready is None or self.is_ready())


class Thread:
    def __init__(self, scheduler, target, args, name, daemon):
        self._scheduler = scheduler
        self._target, self._args = target, args
        self.name, self.daemon = name, daemon
        self._task = None

    def start(self):
        scheduler = self._scheduler
        scheduler.point("start")
        task = Task(scheduler, f"worker {len(scheduler.threads)}")
        self._task = task
        task.real = threading.Thread(target=self._run, name=self.name, daemon=True)
        scheduler.threads.append(task)
        task.real.start()
        scheduler.point("started")

    def _run(self):
        task, scheduler = self._task, self._scheduler
        task.ident = threading.get_ident()
        task.baton.acquire()
        try:
            if scheduler.abandoned is None:
                self._target(*self._args)
        except Abandoned:
            pass
        except BaseException as error:
            task.error = error
        del self._target, self._args
        task.is_over = True
        scheduler.trace.append(f"{task.name}: end")
        if scheduler.abandoned is None:
            scheduler._pass_on(task)

    def join(self, timeout=None):
        self._scheduler.point("join", lambda: self._task.is_over)

    def is_alive(self):
        return self._task is not None and not self._task.is_over


class Condition:
    def __init__(self, scheduler):
        self._scheduler = scheduler
        self._owner = None
        self._waiting = deque()

    def __enter__(self):
        caller = sys._getframe(1).f_code.co_name
        self._scheduler.point(f"lock in {caller}", lambda: self._owner is None)
        self._owner = self._scheduler.running
        return self

    def __exit__(self, *exc_info):
        # Others go on at this thread's next point, with nothing seen of it in between.
        self._owner = None

    def wait(self):
        caller = sys._getframe(1).f_code.co_name
        scheduler, task = self._scheduler, self._scheduler.running
        assert self._owner is task
        scheduler.point(f"about to wait in {caller}")
        self._waiting.append(task)
        self._owner = None
        scheduler.point(
            f"wait in {caller}",
            lambda: task not in self._waiting and self._owner is None,
        )
        self._owner = task

    def notify(self, count=1):
        assert self._owner is self._scheduler.running
        if sys._getframe(1).f_code.co_name in self._scheduler.silent:
            return
        for _ in range(min(count, len(self._waiting))):
            self._waiting.popleft()

    def notify_all(self):
        assert self._owner is self._scheduler.running
        if sys._getframe(1).f_code.co_name not in self._scheduler.silent:
            self._waiting.clear()


class Event:
    def __init__(self, scheduler):
        self._scheduler = scheduler
        self._is_set = False

    def is_set(self):
        return self._is_set

    def set(self):
        self._scheduler.point("set")
        self._is_set = True

    def wait(self, timeout=None):
        self._scheduler.point("wait for it", self.is_set, timeout is not None)
        return self._is_set


def _is_within(name):
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


def explore(run, preemptions, timeouts="never", silent=(), interrupt=None, most=None):
    """Call ``run(scheduler)`` once for each interleaving; return how many there were.

    Args:
        run: does the same each time but for the scheduler, and asserts what must hold.
        preemptions: the most in one run.
        most: stop after so many runs, None for all.

    Raises:
        Deadlock: nobody could go on; the message has the trace. Else what ``run``, or a
            thread, has raised, with the trace as a note where Python has them.
    """
    plan, count = [], 0
    while plan is not None and count != most:
        scheduler = Scheduler(plan, timeouts, silent, interrupt)
        error = None
        try:
            run(scheduler)
        except BaseException as caught:
            error = caught
        error = scheduler.finish(error)
        count += 1
        if error is not None:
            if not isinstance(error, Deadlock):
                scheduler.trace.append(f"{type(error).__name__}: {error}")
                print("\n  ".join(["the interleaving was", *scheduler.trace]))
            raise error
        decided = [decision.taken for decision in scheduler.decisions]
        assert decided[: len(plan)] == plan, "a run does not repeat itself"
        plan = _next_plan(scheduler.decisions, preemptions)
    return count


def _next_plan(decisions, preemptions):
    """Return the decisions of the next run: the last one that can be is another."""
    spent = [0]
    for decision in decisions:
        spent.append(spent[-1] + decision.costs[decision.taken])
    for number in reversed(range(len(decisions))):
        decision = decisions[number]
        for taken in range(decision.taken + 1, decision.options):
            if spent[number] + decision.costs[taken] <= preemptions:
                return [*(d.taken for d in decisions[:number]), taken]
    return None
