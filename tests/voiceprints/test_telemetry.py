"""The ONNX Runtime reports to its maker unless the environment says no: without that word no model is loaded."""

from __future__ import annotations

import pytest

from synth.hibari_engine import HibariEngine
from voiceprints.activity import Activity
from voiceprints.encoder import Encoder
from voiceprints.errors import ModelRefused


@pytest.mark.parametrize("door", [Activity, Encoder, HibariEngine])
@pytest.mark.parametrize("value", [None, "0", ""])
def test_no_door_opens_where_telemetry_is_on(door: type, value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("ORT_DISABLE_TELEMETRY")
    else:
        monkeypatch.setenv("ORT_DISABLE_TELEMETRY", value)
    with pytest.raises(ModelRefused, match="ORT_DISABLE_TELEMETRY"):
        door()
