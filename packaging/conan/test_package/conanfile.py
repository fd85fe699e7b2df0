"""A program of the package's: the one of tests/consumer, on a checkpoint of tests/golden."""

import pathlib

from conan import ConanFile
from conan.tools.build import can_run
from conan.tools.cmake import CMake, cmake_layout


class Consumer(ConanFile):
    settings = "os", "compiler", "build_type", "arch"
    generators = "CMakeDeps", "CMakeToolchain"

    def requirements(self):
        self.requires(self.tested_reference_str)

    def layout(self):
        cmake_layout(self)

    def build(self):
        cmake = CMake(self)
        cmake.configure({"COMPONENT": "Core"}, build_script_folder=str(self.tests / "consumer/project"))
        cmake.build()

    def test(self):
        if can_run(self):
            checkpoint = self.tests / "golden/dtypes.safetensors"
            self.run(f"{self.build_folder}/consumer {checkpoint} {self.build_folder}/saved", env="conanrun")

    @property
    def tests(self):
        return pathlib.Path(self.recipe_folder, "../../../tests").resolve()
