"""Measures how much of its context a model uses, on documents and on generated tasks.

context (documents: loss by true context) · tasks (sequences from a seed; train on a task, accuracy)
"""

from gss.probe.context import ContextProbe, probe_context, shared_longest
from gss.probe.tasks import TASKS, Stage, TaskResult, make_task, task_accuracy, task_optimizer, train_on_task

__all__ = [
    "TASKS",
    "ContextProbe",
    "Stage",
    "TaskResult",
    "make_task",
    "probe_context",
    "shared_longest",
    "task_accuracy",
    "task_optimizer",
    "train_on_task",
]
