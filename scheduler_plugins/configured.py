"""Deployments that the scheduler's own configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distributed.utils import offload

from daskinfer import config
from daskinfer.entries import plan_of_entry
from daskinfer.exceptions import DeploymentFailed
from daskinfer.failure import contain, describe
from daskinfer.logs import Log
from daskinfer.names import shown

if TYPE_CHECKING:
    from daskinfer.artifact import Artifact
    from daskinfer.planning import Plan
    from scheduler_plugins.inference import InferencePlugin

logger = Log("configured")

_KEY = "daskinfer.deployments"
_STIMULUS = "daskinfer-configured"


class Configured:
    """Deploys what ``daskinfer.deployments`` names when the scheduler starts.

    The models are taken apart in this process, as :func:`daskinfer.deploy` does in the
    client's. What is wrong with one is logged, and keeps no other from being deployed.

    Parameters
    ----------
    plugin
        Who deploys.

    Attributes
    ----------
    problems
        Why what is named is not deployed, by name.
    """

    def __init__(self, plugin: InferencePlugin) -> None:
        self.plugin = plugin
        self.problems: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<Configured problems: {sorted(self.problems)}>"

    def start(self) -> None:
        """Begin to deploy; it goes on in the background."""
        entries = config.get("deployments")
        if not isinstance(entries, Mapping):
            told = f"must map names to deployments, not {entries!r}"
            logger.error(
                "%s %s: nothing of it is deployed", _KEY, told, stimulus_id=_STIMULUS
            )
            self.problems[_KEY] = told
            return
        for name in entries:
            self.problems[shown(name)] = "it is about to be deployed"
        if entries:
            self.plugin.tasks.in_background(self._deploy_all, dict(entries))

    async def _deploy_all(self, entries: dict[object, object]) -> None:
        for name, entry in entries.items():
            try:
                await self._deploy(name, entry)
            except Exception as error:
                self.problems[shown(name)] = describe(error)
                logger.error(
                    "%s.%s is not deployed: %s",
                    *(_KEY, shown(name), error),
                    exc_info=True,
                    deployment=shown(name),
                    stimulus_id=_STIMULUS,
                    limited=False,
                )

    async def _deploy(self, name: object, entry: object) -> None:
        plan = await offload(contain, plan_of_entry, name, entry)
        offer = await self._bring(plan.artifact)
        try:
            await self._register(plan)
        finally:
            if offer is not None:
                await self.plugin.distribution.withdraw(offer)

    async def _register(self, plan: Plan) -> None:
        answer = await self.plugin.service.deploy(**plan.to_message(), client="")
        if answer["status"] == "error":
            raise ValueError(answer["message"])
        del self.problems[plan.name]
        exists = answer["status"] == "exists"
        told = "%r is %s: somebody else was faster" if exists else "%r is %s"
        logger.info(
            told,
            plan.name,
            "deployed already" if exists else f"deployed as {_KEY} says",
            deployment=plan.name,
            version=None if exists else plan.version,
            stimulus_id=_STIMULUS,
            limited=False,
        )

    async def _bring(self, artifact: Artifact) -> int | None:
        """Put large weights where workers fetch them; return what holds them there."""
        if artifact.is_inline:
            return None
        assert artifact.chunks is not None and artifact.weights is not None
        distribution, chunks = self.plugin.distribution, artifact.chunks
        answer = _checked(await distribution.offer("", chunks.to_message()))
        number: int = answer["offer"]
        try:
            for index in answer["missing"]:
                part = artifact.weights[slice(*chunks.span(index))]
                _checked(await distribution.upload(number, index, part))
        except BaseException:
            await distribution.withdraw(number)
            raise
        return number


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if answer["status"] != "OK":
        raise DeploymentFailed(str(answer["message"]))
    return answer
