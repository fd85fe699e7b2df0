#!/usr/bin/env python3
"""Directories as other trainers make them: what each command says of them.

    trainers_test.py TESSERA GOLDEN_DIRECTORY

TABLE has a row for each directory or file: the command either reads it, with these kind and leaves, or refuses it with this code and
words. docs/formats/trainers.md is the page.
"""
import json
import os
import pathlib
import shutil
import sys
import unittest

from made import Case, tessera, write_safetensors

TESSERA = GOLDEN = None


def copied(name):
    return lambda place: shutil.copytree(GOLDEN / "trainers" / name, place)


def files(*names):
    def make(place):
        for name in names:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(b"x" * 600)
    return make


def without(make, *names):
    def made(place):
        make(place)
        for name in names:
            path = place / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return made


def transformers(place):
    """As transformers' Trainer leaves it."""
    place.mkdir()
    write_safetensors(place / "model.safetensors", {"lm_head.weight": ("F32", [1], bytes(4))})
    for name in ("config.json", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json", "training_args.bin"):
        (place / name).write_bytes(b"{}")


LEFT = ["optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json", "training_args.bin"]
MODEL = "pytorch_model_fsdp_0"

# name -> (how it is made, kind, number of leaves, some of them, words of the warning)
READ = {
    "accelerate": (copied("accelerate"), "dcp", 28, ["model.0.weight", "optimizer.state.0.weight.exp_avg", "optimizer.param_groups.0.lr"], ""),
    "accelerate, weights": (without(copied("accelerate"), "optimizer_0"), "dcp", 4, ["model.2.bias"], "these are the weights alone"),
    "megatron": (copied("megatron"), "dcp", 5, ["decoder.layers.w", "rng/shard_0_1", "common.iteration", "common.args.hidden"], ""),
    "lightning": (copied("lightning"), "dcp", 4, ["model.weight", "epoch", "hp.a"], ""),
    "torch_checkpointing": (copied("torch_checkpointing"), "rank-files", 5, ["model.1.bias", "step"], ""),
    "transformers": (transformers, "safetensors", 1, ["lm_head.weight"], ", ".join(LEFT) + ": not part of it"),
}

# name -> (how it is made, the path in it, code, words)
REFUSED = {
    "accelerate, model unfinished": (without(copied("accelerate"), MODEL + "/.metadata"), "", "incomplete", MODEL + " has no .metadata"),
    "accelerate, optimizer unfinished": (without(copied("accelerate"), "optimizer_0/.metadata"), "", "incomplete", "optimizer_0 has no .metadata"),
    "accelerate, optimizer": (without(copied("accelerate"), MODEL), "", "incomplete", "not the model's directory"),
    "megatron, older": (files("mp_rank_00/model_optim_rng.pt"), "", "unsupported", "Megatron-LM in its older form"),
    "nemo": (files("model.nemo"), "model.nemo", "unsupported", "NeMo archive"),
    "orbax": (files("_CHECKPOINT_METADATA", "manifest.ocdbt"), "", "unsupported", "Orbax"),
    "data file": (copied("lightning"), "__0_0.distcp", "incomplete", "open the directory that it is in"),
}


class Trainers(Case):
    def made(self, name, make):
        place = self.work / name.replace(" ", "_")
        make(place)
        return place

    def test_what_is_read(self):
        for name, (make, kind, count, some, warning) in READ.items():
            with self.subTest(name):
                place = self.made(name, make)
                listed = tessera("ls", place, "--json")
                leaves = [leaf["name"] for leaf in json.loads(listed.stdout)]
                self.assertEqual(len(leaves), count, leaves)
                self.assertLessEqual(set(some), set(leaves))
                self.assertEqual("warning" in listed.stderr, bool(warning), listed.stderr)
                self.assertIn(warning, listed.stderr)
                facts = json.loads(tessera("stat", place, "--json").stdout)
                self.assertEqual((facts["kind"], facts["complete"]), (kind, True))
                self.assertEqual(tessera("verify", place).returncode, 0)
                target = self.work / (place.name + ".pt")
                self.assertEqual(tessera("convert", place, target, "--quiet").returncode, 0)
                kept = [leaf["name"] for leaf in json.loads(tessera("ls", target, "--json").stdout)]
                for leaf in leaves:  # what a value holds has a name of its own in one file
                    self.assertTrue(any(other == leaf or other.startswith(leaf + ".") for other in kept), leaf)
                self.assertEqual(tessera("diff", place, target, "--only", some[0]).returncode, 0)

    def test_every_file_of_it_is_sealed(self):
        for name in ("accelerate", "megatron", "lightning", "torch_checkpointing"):
            place = self.made(name, copied(name))
            self.assertEqual(tessera("seal", place).returncode, 0)
            self.assertEqual(tessera("verify", place).returncode, 0)
            for path in sorted(place.rglob("*")):
                if not path.is_file() or path.name.startswith("tessera-"):
                    continue
                sound = path.read_bytes()
                path.write_bytes(sound[:len(sound) // 2] + bytes([sound[len(sound) // 2] ^ 1]) + sound[len(sound) // 2 + 1:])
                self.assertEqual(tessera("verify", place).returncode, 1, path)
                path.write_bytes(sound)

    def test_what_is_refused(self):
        for name, (make, path, code, words) in REFUSED.items():
            with self.subTest(name):
                place = self.made(name, make) / path
                for verb in ("ls", "stat"):
                    self.refused(code, verb, place)
                self.assertIn(words, tessera("ls", place).stderr)

    def test_what_is_left_behind_is_in_the_notes(self):
        place = self.made("hf", transformers)
        done = json.loads(tessera("convert", place, self.work / "hf.pt", "--json").stdout)
        self.assertEqual(len(done["notes"]), 1)
        self.assertTrue(done["notes"][0].startswith(", ".join(LEFT) + ": "), done["notes"])
        states = {row["file"]: row["state"] for row in json.loads(tessera("stat", place, "--json").stdout)["directory"]}
        self.assertEqual({states[name] for name in LEFT}, {"not part of it"})

    def test_what_megatron_says_of_its_files(self):
        told = tessera("stat", self.made("megatron", copied("megatron"))).stdout
        self.assertIn("metadata.json: used, sharded_backend: torch_dist, sharded_backend_version: 1, common_backend: torch", told)

    def test_the_metadata_stands_for_its_directory(self):
        self.assertEqual(tessera("ls", self.dcp / ".metadata").stdout, tessera("ls", self.dcp).stdout)


if __name__ == "__main__":
    TESSERA, GOLDEN = os.path.abspath(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve()
    Case.command, Case.golden = TESSERA, GOLDEN
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
