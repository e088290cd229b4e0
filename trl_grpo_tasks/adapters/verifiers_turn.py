"""One turn of a task of verifiers: its prompt, the scored trace of an answer, and which tasks need more than that."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from . import wait_for


def messages_of(task: Any) -> list[dict[str, str]]:
    """The prompt of a task as chat messages, with its system prompt first."""
    from verifiers.v1.types import content_text

    data = task.data
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *({"role": message.role, "content": content_text(message.content)} for message in data.prompt)]


def scored_trace(task: Any, prompt: Sequence[Mapping[str, str]], completion: str) -> Any:
    """The trace of one turn, as verifiers' own rollouts leave it, with the task's rewards and metrics."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask

    nodes = [MessageNode(message=message, parent=place - 1 if place else None) for place, message in enumerate(prompt)]
    answer = {"role": "assistant", "content": completion}
    nodes.append(MessageNode(message=answer, parent=len(nodes) - 1, sampled=True))
    about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    trace = Trace(task=about, agent=AgentInfo(config=AgentConfig()), nodes=nodes, is_completed=True, ok=True)
    wait_for(task.score(trace))
    return trace


def refuse_more_than_one_turn(task: Any, taskset: Any) -> None:
    """Raise ValueError for tasks whose answer is more than one completion, or whose rewards need a container."""
    from verifiers.v1.envs.single_agent.env import SingleAgentEnv
    from verifiers.v1.task import Task
    from verifiers.v1.utils.loaders import environment_class

    needs = []
    if (own := environment_class(taskset.config.id)) is not SingleAgentEnv:
        needs.append(f"the turns of {own.__name__}")
    if task.NEEDS_CONTAINER:
        needs.append("a container")
    if task.toolsets(task.config) or taskset.toolsets(taskset.config):
        needs.append("tools")
    if any(getattr(type(task), hook) is not getattr(Task, hook) for hook in ("setup", "finalize")):
        needs.append("setup or finalize hooks, which need a runtime")
    for reward in task.hooks("reward"):
        parameter = inspect.signature(reward).parameters.get("runtime")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            needs.append(f"a runtime for the reward {reward.__name__}")
    if task.data.prompt is None:
        needs.append("a user that opens the conversation")
    if needs:
        raise ValueError(f"tasks of {taskset.config.id} need {', '.join(needs)}; only tasks that are answered in one "
                         "completion can be trained here, so train this one with verifiers itself")  # fmt: skip
