"""What the Hub's API answers, as it is documented and as the Hub of the tests says it, for fuzz/hub_answers.cpp.

    .venv/bin/python tests/golden/make/hub_answers.py
"""
import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve()
OUT = HERE.parents[1] / "hub_answers"
sys.path.insert(0, str(HERE.parents[2] / "stores"))
from hub_server import Hub  # noqa: E402

FILES = {"config.json": b"{}", "model-00001-of-00002.safetensors": b"x" * 99, "sub/vocab.txt": b"a\nb"}
NEXT = '<https://hub.example/api/models/org/model/tree/main?recursive=true&limit=1000&cursor=ZXlKbQ%3D%3D>; rel="next"'

OUT.mkdir(exist_ok=True)
(OUT / "tree.json").write_text(json.dumps(Hub.tree(FILES, "", True)) + "\n")
(OUT / "revision.json").write_text(json.dumps({"_id": "65f1", "id": "org/model", "sha": "0123456789" * 4, "private": False}) + "\n")
(OUT / "link.txt").write_text(NEXT + "\n")
