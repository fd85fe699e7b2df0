"""Writes yaml_scalars.json: how OLMo's loader (OmegaConf over PyYAML) types plain scalars (Y05, Y06).

    python yaml_scalars.py tests/golden/yaml_scalars.json      (omegaconf 2.4.0, PyYAML 6.0.3)

Each row: the text after "k: ", the Python type, its repr.
"""
import io
import json
import sys

from omegaconf import OmegaConf

WORDS = """no No NO nO yes Yes on Off OFF true TRUE tRue false y n ~ null Null NULL nUll
0 -0 +7 00 0_0 012 -012 +012 0o14 018 08 1_000 1_0_ _1 0b101 0b_1 0b2 0x1F 0x_f -0x10 0xg 1:30 1:30:15 01:30 1:60
9999999999999999999999999999999999999999 -9223372036854775808 9223372036854775808 9223372036854775807
1. 1.5 -1.5 +1.5 0. 1.5e3 1e3 1E-2 1e+2 1_0.5 1__0.5 .5 .5e1 .5e+1 -.5 ._5 .5_ 1.5_ 1e999 -1e999 1e-999 1:30.5 -1:30.5
.inf -.inf +.Inf .INF .nan .NaN inf nan -.nan 1.2.3 + . -- 1e 1e5e 2020-01-01 2020-01-01T00:00:00Z 12ab
${env:SECRET} ${path.choose:a,b} step1000 s3://bucket/x a:b""".split()

rows = []
for word in WORDS:
    value = OmegaConf.to_container(OmegaConf.load(io.StringIO(f"k: {word}\n")), resolve=False)["k"]
    rows.append([word, type(value).__name__, repr(value)])
with open(sys.argv[1], "w") as file:
    file.write("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
