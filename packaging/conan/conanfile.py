"""The checkpoint library for Conan 2: `conan create packaging/conan` in a checkout.

The names of what it needs are those of Conan's own center. packaging/conan/debian12 is a profile in which Debian's packages stand
for them, so that nothing is fetched: `conan create packaging/conan --profile:all packaging/conan/debian12`. The training runtime
is left out: its libtorch comes as a wheel, which Conan does not have.
"""

import pathlib
import re

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy, rmdir
from conan.tools.gnu import PkgConfigDeps


class Tessera(ConanFile):
    name = "tessera"
    description = "Reads and writes PyTorch's, safetensors' and OLMo's checkpoints without Python"
    license = "Apache-2.0"
    topics = ("pytorch", "checkpoint", "safetensors")
    package_type = "library"
    settings = "os", "compiler", "build_type", "arch"
    options = {"shared": [True, False], "remote": [True, False], "command": [True, False]}
    default_options = {"shared": False, "remote": True, "command": True}

    def set_version(self):
        text = pathlib.Path(self.recipe_folder, "../../CMakeLists.txt").read_text(encoding="utf-8")
        self.version = re.search(r"^project\(Tessera VERSION ([\d.]+)", text, re.MULTILINE)[1]

    def export_sources(self):
        root = pathlib.Path(self.recipe_folder, "../..")
        for folder in ("cmake", "include", "src", "docs", "tools"):
            copy(self, f"{folder}/*", src=root, dst=self.export_sources_folder)
        for name in ("CMakeLists.txt", "CHANGELOG.md", "LICENSE", "SECURITY.md"):
            copy(self, name, src=root, dst=self.export_sources_folder)

    def requirements(self):
        for needed in ("fmt/9.1.0", "libdeflate/1.14", "nlohmann_json/3.11.2", "re2/20220601", "xxhash/0.8.1", "yaml-cpp/0.7.0",
                       "zlib/1.2.13", "zstd/1.5.4"):
            self.requires(needed)
        if self.options.remote:
            for needed in ("libcurl/7.88.1", "openssl/3.0.20", "pugixml/1.13"):
                self.requires(needed)
        if self.options.command:
            self.requires("cli11/2.1.2")

    def layout(self):
        cmake_layout(self)

    def generate(self):
        CMakeDeps(self).generate()
        PkgConfigDeps(self).generate()
        toolchain = CMakeToolchain(self)
        for option in ("TORCH", "TESTS", "EXAMPLES", "BENCH"):
            toolchain.cache_variables[f"TESSERA_{option}"] = False
        toolchain.cache_variables["TESSERA_REMOTE"] = bool(self.options.remote)
        toolchain.cache_variables["TESSERA_COMMAND"] = bool(self.options.command)
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", src=self.source_folder, dst=pathlib.Path(self.package_folder, "licenses"))
        rmdir(self, pathlib.Path(self.package_folder, "share", "man"))

    def package_info(self):
        # Tessera's own package file, as find_package finds it where it was installed otherwise.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [str(file.parent.relative_to(self.package_folder))
                                   for file in pathlib.Path(self.package_folder).rglob("TesseraConfig.cmake")]
