"""The worker's configuration, as far as the worker here reads it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class MegatronWorkerConfig(BaseModel):
    """Takes any field."""

    model_config = ConfigDict(extra="allow")

    metric_logger_config: dict[str, Any] = {}
