"""Runs a Strategy: attach, the session, buckets, the communication thread, checkpoints."""

from laconic.runtime.attach import attach
from laconic.runtime.checkpoint import redistribute
from laconic.runtime.elastic.settings import Elastic
from laconic.runtime.elastic.view_history import ViewChange
from laconic.runtime.session import Session

__all__ = ["Elastic", "Session", "ViewChange", "attach", "redistribute"]
