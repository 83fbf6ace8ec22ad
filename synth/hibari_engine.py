"""The door to hibari-tts (Apache-2.0): a small English model that gives spectra, not samples, so that a voice can colour them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from hibari import dsp
from hibari.g2p import G2P
from hibari.g2p.normalize import normalize
from hibari.g2p.oov import OOV
from hibari.tts import ASSETS, Hibari

from synth import bands, conditioning
from synth.colour import SCRATCH_BYTES, Colour, keep_below_full_scale
from synth.conditioning import Conditioning
from synth.engine import Samples, Scratch
from synth.errors import SpeedRefused, SynthError, Unspeakable
from synth.models import SHIPPED, load_manifest, require_one_runtime
from synth.phones import Phones, open_session
from synth.text import FrontEnd, Script, Sentence, Word, read

Array = npt.NDArray[np.float32]
Classes = npt.NDArray[np.intp]

SLOWEST, FASTEST = 0.5, 2.0
OWN_PITCH = (7.565, 0.205)  # median and spread of log2 F0 of REFERENCE, as `prosody.track` hears it
_TOKEN_OF_FRAME = "/ReduceSum_1_output_0"  # noqa: S105 — the model's alignment: token index per 25 ms, two of its frames
_LAYOUT = b"glottis conditioning 1"
_CORRECTIONS = 2
REFERENCE = (
    "The old ship sailed past the harbor, and nobody on the shore saw it leave.",
    "Please bring seven yellow books to the large table near the window.",
    "Joyce thought the weather was unusually mild for the time of year.",
    "Which of these cheap watches did your father choose?",
    "A vague measure of pleasure hung over the garage.",
    "He pushed the heavy cart up the hill until his arms ached.",
    "Young children enjoy playing with boats in the bath.",
    "They have found good wood for the roof of the house.",
    "My uncle gave me five thin rings, three thick chains and a small jewel.",
    "Her voice was calm, but her hands were shaking.",
    "It is not far from here to the city of Geneva.",
)


class HibariEngine:
    """Implements `Engine`. Holds no state between calls, and no voice."""

    def __init__(self, assets: Path | None = None) -> None:
        """Load and check every file. Raises ModelRefused, RuntimeConflict."""
        require_one_runtime()
        folder = Path(ASSETS) if assets is None else assets
        manifest = load_manifest(SHIPPED / "hibari.manifest.json")
        manifest.verify(folder)
        self._phones = Phones()
        self._session = open_session(manifest.read(folder, "hibari.onnx"), manifest, tap=_TOKEN_OF_FRAME)
        spelling = OOV(str(folder / "oov.onnx"), open_session(manifest.read(folder, "oov.onnx")))
        self._g2p = G2P(oov=spelling)
        self._front = FrontEnd(
            letters=frozenset(spelling.cin),
            sentences=Hibari.split_sentences,
            words=self._words,
            ids=json.loads(manifest.read(folder, "vocab.json")),
        )
        self.sample_rate = manifest.rate
        self.conditioning_size = manifest.conditioning
        self.scratch_bytes = SCRATCH_BYTES
        content = hashlib.sha256(_LAYOUT + bytes.fromhex(manifest.digest + self._phones.manifest.digest)).hexdigest()
        self.model_id = f"{manifest.name}:{content[:32]}"
        self._reference = tuple(sentence for text in REFERENCE for sentence in self.read(text).sentences)

    def read(self, text: str) -> Script:
        """See `Engine.read`."""
        return read(text, self._front)

    def _words(self, sentence: str) -> list[Word]:
        try:
            tokens = self._g2p.phonemize_tokens(self._g2p.tokenize(normalize(sentence)))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            # Without its cause: the foreign message may quote the text.
            raise Unspeakable("a sentence of this text cannot be read") from None
        return [Word(token.text, token.phonemes or "", bool(token.whitespace)) for token in tokens]

    def measure(self, samples: Samples, out: Array, scratch: Scratch) -> None:  # noqa: ARG002 — everything is computed in `out`
        """See `Engine.measure`."""
        conditioning.measure(samples, self._phones, self._own_speech, out)

    def _own_speech(self, voice: Conditioning) -> Iterator[tuple[Array, Classes]]:
        """The reference sentences in the model's timbre and the voice's pitch: log bands and phones, frame by frame."""
        for sentence in self._reference:
            spectra, curve, classes = self._run(sentence, 1.0)
            moved = voice.moved(curve, OWN_PITCH)
            power = bands.powers(self._sound(spectra, moved, _seed(sentence)), self.sample_rate)
            yield bands.log_bands(power, denoise=False), classes

    def speak(self, script: Script, conditioning: Array, scratch: Scratch, *, speed: float = 1.0) -> Iterator[Samples]:
        """See `Engine.speak`."""
        if not SLOWEST <= speed <= FASTEST:
            raise SpeedRefused(f"speed {speed:g} is outside {SLOWEST:g} to {FASTEST:g}")
        voice = Conditioning.of(conditioning)
        voice.check()
        colour = None if voice.neutral else Colour(voice, OWN_PITCH, scratch)
        return self._blocks(script, colour, speed)

    def _blocks(self, script: Script, colour: Colour | None, speed: float) -> Iterator[Samples]:
        for sentence in script.sentences:
            samples = self._say(sentence, colour, speed)
            if not np.isfinite(samples).all():
                raise SynthError("the model gave samples that are no numbers")
            keep_below_full_scale(samples)
            yield samples

    def _say(self, sentence: Sentence, colour: Colour | None, speed: float) -> Samples:
        """One sentence. A colour is laid on twice, because sound made from spectra differs a little from what they say."""
        spectra, curve, classes = self._run(sentence, speed)
        seed = _seed(sentence)
        if colour is None:
            return self._sound(spectra, curve, seed)
        curve = colour.pitch(curve)
        samples = self._sound(spectra, curve, seed)
        power = bands.powers(samples, self.sample_rate)
        unit = bands.mean_active(power)
        log = bands.log_relative(power, unit)
        target = colour.target(log, classes)
        for _ in range(_CORRECTIONS):
            colour.equalise(target, log, (spectra[0], spectra[2], spectra[3]))
            samples = self._sound(spectra, curve, seed)
            power = bands.powers(samples, self.sample_rate)
            log = bands.log_relative(power, unit)
        colour.loudness(samples, bands.active(power, 25))
        return samples

    def _run(self, sentence: Sentence, speed: float) -> tuple[tuple[Array, ...], Array, Classes]:
        """The network: spectra lh, theta, ln, lr, phi [601, frames], pitch curve [frames] in Hz, phone of each frame."""
        feeds = {"ids": np.array([sentence.ids], np.int64), "speed": np.array([speed], np.float32)}
        *spectra, curve, tokens = self._session.run(None, feeds)
        frames = curve.shape[1]
        classes = self._phones.classes(sentence.ids)[np.repeat(tokens, 2)[:frames]]
        return tuple(part[0] for part in spectra), curve[0], classes

    def _sound(self, spectra: tuple[Array, ...], curve: Array, seed: int) -> Samples:
        samples: Samples = dsp.synth(*spectra, curve, np.random.default_rng(seed))
        return samples


def _seed(sentence: Sentence) -> int:
    """The noise of a sentence follows from its tokens: the same text sounds the same every time."""
    return int.from_bytes(hashlib.sha256(np.array(sentence.ids, np.int64).tobytes()).digest()[:8])
