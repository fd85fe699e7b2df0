// What tools/cpu-budget compiles to learn how fast this machine compiles: templates of the standard
// library, nothing of ours, so that it stays the same when our code grows.
#include <functional>
#include <iostream>
#include <map>
#include <regex>
#include <string>
#include <unordered_map>
#include <vector>

int main(int count, char** arguments) {
  const std::regex pattern(arguments[0]);
  std::map<std::string, std::vector<bool>> matches;
  for (int i = 1; i < count; ++i)
    matches[arguments[i]].push_back(std::regex_match(arguments[i], pattern));
  std::unordered_map<std::string, std::function<std::size_t()>> sizes;
  sizes["matches"] = [&] { return matches.size(); };
  std::cout << sizes["matches"]() << "\n";
}
