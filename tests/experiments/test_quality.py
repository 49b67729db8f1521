"""Systems on the same tokens: trained, scored by document, paired."""

import json
from pathlib import Path

import pytest

from experiments import quality
from gss.data import load_tokenizer, prepare

TINY = ("steps=2", "length=32", "batch_tokens=64", "compile=false", "optimizer.warmup_steps=1")


def test_systems_are_paired_with_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split, count in (("train", 3), ("valid", 4)):
        (tmp_path / "text" / split).mkdir(parents=True)
        for i in range(count):
            (tmp_path / "text" / split / f"{i}.txt").write_text(f"{split} {i} " * (90 + i))
    prepare([str(tmp_path / "text")], tmp_path / "corpus", load_tokenizer("bytes"))
    small = ("+model.width=8", "+model.depth=3", "+model.feedforward_width=8", "+model.attention.heads=2")
    systems = [f"{name}{''.join(small)}" for name in ("llama-tiny", "gss2-tiny")]
    results = [quality.measure(system, str(tmp_path / "corpus"), tmp_path / "runs", TINY) for system in systems]
    out = tmp_path / "quality.json"
    out.write_text(json.dumps({"results": results}))
    quality.main([str(tmp_path / "corpus"), "--systems", ",".join(systems), "--out", str(out)])
    printed = capsys.readouterr().out
    assert [len(documents) for documents in results[0]["documents"].values()] == [4] * len(results[0]["documents"])
    choose, report = printed.split("documents to report")
    assert systems[1] in choose
    assert systems[1] in report
    assert report.count("±") == len(results[1]["documents"])
    own = results[0]["documents"]["512"]
    assert quality.half(own, "choose") + quality.half(own, "report") != own
    assert sorted(quality.half(own, "choose") + quality.half(own, "report")) == sorted(own)
