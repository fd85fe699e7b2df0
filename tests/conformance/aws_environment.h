// For tests: an environment that says nothing of stores and their credentials.
#pragma once

#include <cstdlib>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "conformance/temporary_directory.h"

extern char** environ;

namespace tessera {

// Takes the variables away that stores look at, and gives them back. The home directory is an empty
// one; nothing of AWS's metadata service is asked.
class AwsEnvironment {
 public:
  AwsEnvironment() {
    std::vector<std::string> all;
    for (char** one = environ; *one != nullptr; ++one) all.emplace_back(*one);
    for (const std::string& one : all) {
      const std::size_t equals = one.find('=');
      const std::string name = one.substr(0, equals);
      if (!is_of_stores(name)) continue;
      old_[name] = one.substr(equals + 1);
      ::unsetenv(name.c_str());
    }
    set("HOME", home_.path());
    set("AWS_EC2_METADATA_DISABLED", "true");
  }
  ~AwsEnvironment() {
    for (const auto& [name, value] : set_) ::unsetenv(name.c_str());
    for (const auto& [name, value] : old_) ::setenv(name.c_str(), value.c_str(), 1);
  }
  AwsEnvironment(const AwsEnvironment&) = delete;
  AwsEnvironment& operator=(const AwsEnvironment&) = delete;

  void set(const std::string& name, const std::string& value) {
    set_[name] = value;
    ::setenv(name.c_str(), value.c_str(), 1);
  }
  static void unset(const std::string& name) { ::unsetenv(name.c_str()); }

  // Writes a file below the home directory, and returns its path.
  std::string write(const std::string& name, const std::string& text) const {
    const std::string path = home_.path() + "/" + name;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }
  void write_config(const std::string& text) const { (void)write(".aws/config", text); }
  void write_credentials(const std::string& text) const { (void)write(".aws/credentials", text); }

 private:
  static bool is_of_stores(std::string_view name) {
    for (const std::string_view prefix :
         {"AWS_", "S3_", "R2_", "WEKA_", "GS_", "HF_", "TRANSFORMERS_", "HUGGING_FACE_",
          "XDG_CACHE_", "TESSERA_S3_"})
      if (name.starts_with(prefix)) return true;
    return name == "HOME" || name == "http_proxy" || name == "https_proxy";
  }

  const TemporaryDirectory home_;
  std::map<std::string, std::string> old_, set_;
};

}  // namespace tessera
