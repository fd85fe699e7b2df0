#include <atomic>
#include <mutex>

#include "checkpoint/load/load_plan.h"
#include "checkpoint/test_support.h"
#include "tessera/library.h"

namespace tessera {

// What a load refuses, reports and tells (P-16, P-20, P-36).

namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using Names = std::vector<std::string>;

Value floats_of(const Shape& shape, bool fill = true) {
  return Value(counting(shape, whole(shape), 0, fill));
}

Value of_dtype(DType dtype, std::int64_t count) {
  Tensor tensor = counting({count * 2}, whole({count * 2}), 0, false);
  tensor.dtype = dtype;
  tensor.shape = {count};
  tensor.pieces[0].slice = whole({count});
  return Value(tensor);
}

bool all_zero(const Value& tensor) {
  const std::vector<float> values = floats(tensor.as_tensor());
  return std::all_of(values.begin(), values.end(), [](float value) { return value == 0; });
}

// Each key of one load that goes wrong in a way of its own, and one that fits.
class Differing : public testing::Test {
 protected:
  Differing() {
    save(Value::dict({{"fits", floats_of({4})},
                      {"shape", floats_of({2, 3})},
                      {"kind", 3},
                      {"wraps", floats_of({2})},
                      {"other", Value::dict({{"x", 1}, {"w", floats_of({2})}})}}),
         directory_);
  }

  Value tree_ = Value::dict({{"gone", Value::dict({{"b", 1}, {"a", floats_of({2}, false)}})},
                             {"fits", floats_of({4}, false)},
                             {"shape", floats_of({3, 2}, false)},
                             {"kind", floats_of({1}, false)},
                             {"wraps", of_dtype(DType::int32, 2)}});
  std::string directory_ = temporary_directory() + "/c";
};

TEST_F(Differing, AllAreInOneErrorAndNothingIsWritten) {
  const Error error = error_of([&] { load(tree_, directory_); });
  EXPECT_EQ(error.code(), ErrorCode::mismatch);
  EXPECT_EQ(error.key(), "gone.a");
  EXPECT_EQ(error.path(), directory_);
  EXPECT_EQ(error.message(),
            "2 keys are not in the checkpoint: 'gone.a', 'gone.b'; 3 keys do not fit: 'kind' (the "
            "checkpoint has a value here, expected a tensor), 'shape' (the checkpoint's shape is "
            "[2, 3], expected [3, 2]), 'wraps' (allow_wrap is needed, what does not fit would "
            "become another number: the checkpoint's dtype is float32, wanted int32)");
  EXPECT_TRUE(all_zero(tree_.at("fits")));
}

TEST_F(Differing, WhatIsReportedIsLeftAloneAndTheRestIsLoaded) {
  LoadOptions options;
  options.missing = OnDifference::report;
  options.unfit = OnDifference::report;
  const LoadReport report = load(tree_, directory_, options);
  EXPECT_EQ(report.missing, (Names{"gone.a", "gone.b"}));
  ASSERT_EQ(report.unfit.size(), 3U);
  EXPECT_EQ(report.unfit[0].key, "kind");
  EXPECT_EQ(report.unfit[1].key, "shape");
  EXPECT_EQ(report.unfit[1].reason, "the checkpoint's shape is [2, 3], expected [3, 2]");
  EXPECT_EQ(report.unfit[2].key, "wraps");
  EXPECT_EQ(report.extra, (Names{"other.w", "other.x"}));
  EXPECT_EQ(report.bytes_needed, 16U);
  EXPECT_EQ(floats(tree_.at("fits").as_tensor()), (std::vector<float>{0, 1, 2, 3}));
  EXPECT_TRUE(all_zero(tree_.at("shape")));
}

// What the log hears of one load.
class LogHeard {
 public:
  LogHeard() {
    set_log([this](LogLevel level, std::string_view text) {
      const std::lock_guard lock(mutex_);
      (level == LogLevel::info ? infos : warnings).emplace_back(text);
    });
  }
  ~LogHeard() { set_log({}); }
  LogHeard(const LogHeard&) = delete;
  LogHeard& operator=(const LogHeard&) = delete;

  Names infos, warnings;  // to be looked at when all is over

 private:
  std::mutex mutex_;
};

TEST(LoadLog, CountsAndNamesWhatWasNotAskedFor) {
  const std::string directory = temporary_directory() + "/c";
  Value optim = Value::dict();
  for (const char* name : {"a", "b", "c", "d", "e", "f"}) optim.set_item(name, floats_of({2}));
  save(Value::dict({{"model", Value::dict({{"w", floats_of({2})}})}, {"optim", optim}}), directory);
  Value model = Value::dict({{"model", Value::dict({{"w", floats_of({2}, false)}})}});
  const LogHeard heard;
  load(model, directory);
  EXPECT_EQ(heard.infos, (Names{"6 keys of the checkpoint were not asked for: optim.a, optim.b, "
                                "optim.c, optim.d, optim.e, ... [" +
                                directory + "]"}));
  model.set_item("optim", Value());  // all that is there
  load(model, directory);
  EXPECT_EQ(heard.infos.size(), 1U);
  EXPECT_TRUE(heard.warnings.empty());
}

TEST(LoadLog, WarnsOfRanksWhoseStateNobodyGoesOnWith) {
  const std::string directory = temporary_directory() + "/c";
  Value ranks = Value::dict({{"world_size", 4}});
  for (int rank = 0; rank < 4; ++rank) ranks.set_item("dp_rank_" + std::to_string(rank), rank);
  save(Value::dict({{"dataloader", ranks}}), directory);
  const LogHeard heard;
  run_ranks(2, [&](Group& group) {
    const std::string own = "dp_rank_" + std::to_string(group.rank());
    Value tree = Value::dict({{"dataloader", Value::dict({{own, -1}})}});
    load(tree, directory, group);
    EXPECT_EQ(tree.at("dataloader").at(own).as_int(), group.rank());
  });
  ASSERT_FALSE(heard.warnings.empty());
  EXPECT_EQ(heard.warnings[0],
            "the checkpoint has dataloader.dp_rank_0 to dataloader.dp_rank_3, what 4 ranks had of "
            "their own: 2 of these are loaded, and nobody goes on with the others [" +
                directory + "]");
}

TEST_F(Differing, EachPolicyStandsAlone) {
  LoadOptions options;
  options.missing = OnDifference::report;
  Error error = error_of([&] { load(tree_, directory_, options); });
  EXPECT_EQ(error.code(), ErrorCode::mismatch);
  EXPECT_EQ(error.key(), "kind");
  EXPECT_EQ(error.message().find("gone"), std::string::npos);
  options = {};
  options.unfit = OnDifference::report;
  error = error_of([&] { load(tree_, directory_, options); });
  EXPECT_EQ(error.code(), ErrorCode::not_found);
  EXPECT_EQ(error.message(), "2 keys are not in the checkpoint: 'gone.a', 'gone.b'");
  options.missing = OnDifference::report;
  options.extra = OnDifference::refuse;
  error = error_of([&] { load(tree_, directory_, options); });
  EXPECT_EQ(error.code(), ErrorCode::mismatch);
  EXPECT_EQ(error.key(), "other.w");
  EXPECT_EQ(error.message(), "2 keys are in the checkpoint alone: 'other.w', 'other.x'");
  EXPECT_TRUE(all_zero(tree_.at("fits")));
}

TEST(LoadDifferences, OneAloneIsSaidInItsOwnWords) {
  const std::string directory = temporary_directory() + "/c";
  save(Value::dict({{"a", floats_of({2})}, {"b", 1}}), directory);
  Value gone = Value::dict({{"z", 0}});
  EXPECT_EQ(error_of([&] { load(gone, directory); }).message(), "the checkpoint has no such key");
  LoadOptions options;
  options.extra = OnDifference::refuse;
  Value less = Value::dict({{"a", floats_of({2}, false)}});
  EXPECT_EQ(error_of([&] { load(less, directory, options); }).message(),
            "the checkpoint has this key, the tree does not");
  Value whole_tree = Value::dict({{"a", floats_of({2}, false)}, {"b", 0}});
  EXPECT_TRUE(load(whole_tree, directory, options).extra.empty());
}

// 47, 4.6: what another name of the same is stands beside it.
TEST(LoadDifferences, AKeyThatEndsAlikeIsNamedBesideTheMissingOne) {
  const std::string directory = temporary_directory() + "/c";
  save(Value::dict({{"lm_head.weight", 1}, {"tail.weight", 2}, {"bias", 3}}), directory);
  const auto message = [&](Value tree) {
    return error_of([&] { load(tree, directory); }).message();
  };
  EXPECT_EQ(message(Value::dict({{"head.weight", 0}})),
            "the checkpoint has no such key (it has 'lm_head.weight')");
  EXPECT_EQ(message(Value::dict({{"head.scale", 0}})), "the checkpoint has no such key");
  EXPECT_EQ(message(Value::dict({{"head.weight", 0}, {"lm_head.weight", 0}, {"z.bias", 0}})),
            "2 keys are not in the checkpoint: 'head.weight' (it has 'tail.weight'), 'z.bias' (it "
            "has 'bias')");
}

TEST(LoadDifferences, AHundredAreNamedAndAllAreCounted) {
  const std::string directory = temporary_directory() + "/c";
  save(Value::dict({{"w", floats_of({2})}}), directory);
  Value tree = Value::dict({{"w", floats_of({3}, false)}});
  for (int i = 0; i < 150; ++i) tree["k" + std::to_string(1000 + i)] = i;
  const Error error = error_of([&] { load(tree, directory); });
  EXPECT_TRUE(error.message().starts_with("150 keys are not in the checkpoint: 'k1000', "));
  EXPECT_NE(error.message().find("'k1099', and 50 more; 1 key does not fit"), std::string::npos)
      << error.message();
  EXPECT_EQ(error.message().find("k1100"), std::string::npos);
}

// An empty dict is a leaf of a torch.save file and none of a tree.
TEST(LoadDifferences, EmptyDictsAreNotExtra) {
  const std::string path = temporary_directory() + "/c.pt";
  const Value tree = Value::dict({{"w", floats_of({2})}, {"state", Value::dict()}});
  save(tree, path);
  LoadOptions options;
  options.extra = OnDifference::refuse;
  Value same = Value::dict({{"w", floats_of({2}, false)}, {"state", Value::dict()}});
  EXPECT_TRUE(load(same, path, options).extra.empty());
}

// Q04: every rank gets the differences of all ranks, and what they share once.
TEST(LoadDifferences, OfAllRanksAreInOneErrorOnAllRanks) {
  const std::string directory = temporary_directory() + "/c";
  save(Value::dict({{"w", floats_of({6})}}), directory);
  std::mutex mutex;
  std::vector<std::string> texts;
  const auto run = [&](const std::function<Value(int)>& tree_of_rank) {
    texts.clear();
    run_ranks(3, [&](Group& group) {
      Value tree = tree_of_rank(group.rank());
      const Error error = error_of([&] { load(tree, directory, group); });
      EXPECT_TRUE(all_zero(tree.at("w")));
      const std::lock_guard lock(mutex);
      texts.emplace_back(error.what());
    });
    ASSERT_EQ(texts.size(), 3U);
    EXPECT_EQ(texts[0], texts[1]);
    EXPECT_EQ(texts[0], texts[2]);
  };
  run([](int rank) {
    return Value::dict(
        {{"w", Value(counting({6}, chunk({6}, rank, 3), 0, false))}, {"x", 1}, {"y", 2}});
  });
  EXPECT_EQ(texts[0],
            "not_found: rank 0, 1, 2: not_found: 2 keys are not in the checkpoint: 'x', 'y' [" +
                directory + ", key 'x'] (planning a load)");
  run([](int rank) {
    Value tree = Value::dict({{"w", Value(counting({6}, chunk({6}, rank, 3), 0, false))}});
    if (rank == 1) tree["x"] = 1;
    return tree;
  });
  EXPECT_NE(texts[0].find("rank 1: not_found"), std::string::npos) << texts[0];
}

TEST(LoadDifferences, AKeyThatOneRankHasIsNotExtra) {
  const std::string directory = temporary_directory() + "/c";
  save(Value::dict({{"a", floats_of({2})}, {"b", floats_of({2})}, {"c", floats_of({2})}, {"d", 1}}),
       directory);
  run_ranks(2, [&](Group& group) {
    Value tree = Value::dict(
        {{"a", floats_of({2}, false)}, {group.rank() == 0 ? "b" : "c", floats_of({2}, false)}});
    EXPECT_EQ(load(tree, directory, group).extra, Names{"d"});
    LoadOptions options;
    options.extra = OnDifference::refuse;
    const Error error = error_of([&] { load(tree, directory, options, group); });
    EXPECT_EQ(error.code(), ErrorCode::mismatch);
    EXPECT_EQ(error.key(), "d");
    tree["d"] = 0;
    if (group.rank() == 1) tree.erase("d");
    EXPECT_TRUE(load(tree, directory, options, group).extra.empty());
  });
}

TEST(LoadDifferences, RanksWithOtherCheckpointsKeepTheirOwnExtraKeys) {
  const std::string directory = temporary_directory() + "/c";
  save(Value::dict({{"a", floats_of({2})}, {"b", 1}}), directory);
  run_ranks(2, [&](Group& group) {
    const std::string suffix = std::to_string(group.rank());
    const Checkpoint own = Checkpoint::open(directory).map([&](Leaf leaf) -> std::optional<Leaf> {
      leaf.name += suffix;
      return leaf;
    });
    Value tree = Value::dict({{"a" + suffix, floats_of({2}, false)}});
    EXPECT_EQ(load(tree, own, {}, group).extra, Names{"b" + suffix});
  });
}

// All ranks throw, also when one of them refuses extra keys, which they talk about once more.
TEST(LoadDifferences, OneRankRefusesForAll) {
  const std::string directory = temporary_directory() + "/c";
  save(Value::dict({{"a", floats_of({2})}, {"b", 1}}), directory);
  run_ranks(3, [&](Group& group) {
    Value tree = Value::dict({{"a", floats_of({2}, false)}});
    LoadOptions options;
    if (group.rank() == 1) options.extra = OnDifference::refuse;
    const Error error = error_of([&] { load(tree, directory, options, group); });
    EXPECT_EQ(error.code(), ErrorCode::mismatch);
    EXPECT_EQ(error.key(), "b");
    EXPECT_TRUE(all_zero(tree["a"]));
  });
}

// However the messages of ranks meet, the result is the same.
TEST(LoadDifferences, MessagesCombineInAnyGrouping) {
  const auto leaves_named = [](const std::string& name) {
    std::vector<Leaf> leaves;
    for (int i = 0; i < 20; ++i) leaves.push_back({name + std::to_string(i), {}, i});
    return leaves;
  };
  const std::vector<Leaf> leaves = leaves_named("a");
  const std::vector<Bytes> messages = {
      untaken_message(leaves, {}, false), untaken_message(leaves, {1, 9, 19}, false),
      untaken_message(leaves, {0, 9, 19}, true), untaken_message(leaves_named("b"), {9}, false)};
  for (const Bytes& a : messages) {
    for (const Bytes& b : messages) {
      for (const Bytes& c : messages)
        EXPECT_EQ(combine_untaken(combine_untaken(a, b), c),
                  combine_untaken(a, combine_untaken(b, c)));
    }
  }
  const Bytes both = combine_untaken(messages[1], messages[2]);
  EXPECT_EQ(untaken_by_all(both, {1, 9, 19}), (std::vector<std::size_t>{9, 19}));
  EXPECT_TRUE(any_refuses(both));
  EXPECT_TRUE(untaken_by_all(combine_untaken(both, messages[0]), {1, 9}).empty());
  EXPECT_EQ(untaken_by_all(combine_untaken(both, messages[3]), {1, 9}),
            (std::vector<std::size_t>{1, 9}));
}

TEST(LoadDifferences, ARankThatCannotPlanIsHeard) {
  const std::string directory = temporary_directory() + "/c";
  save(Value::dict({{"w", floats_of({6})}}), directory);
  std::atomic<int> heard{0};
  run_ranks(2, [&](Group& group) {
    Value tree = Value::dict({{"w", floats_of({6}, false)}});
    LoadOptions options;
    if (group.rank() == 1) options.threads = 0;
    if (error_of([&] { load(tree, directory, options, group); }).code() ==
        ErrorCode::invalid_argument)
      ++heard;
  });
  EXPECT_EQ(heard, 2);
}

// P-20: the tree's names and the checkpoint's are two things.
class Renamed : public testing::Test {
 protected:
  Renamed() {
    save(Value::dict({{"module", Value::dict({{"w", floats_of({4})}, {"n", 7}})}, {"rest", 1}}),
         directory_);
    options_.rename = [](const std::string& key) {
      return "module." + (key == "tied" ? "w" : key);
    };
  }

  std::string directory_ = temporary_directory() + "/c";
  LoadOptions options_;
};

TEST_F(Renamed, KeysAreFoundUnderTheirOtherNames) {
  Value tree =
      Value::dict({{"w", floats_of({4}, false)}, {"tied", floats_of({4}, false)}, {"n", 0}});
  const LoadReport report = load(tree, directory_, options_);
  EXPECT_EQ(floats(tree["w"].as_tensor()), (std::vector<float>{0, 1, 2, 3}));
  EXPECT_EQ(floats(tree["tied"].as_tensor()), (std::vector<float>{0, 1, 2, 3}));
  EXPECT_EQ(tree["n"].as_int(), 7);
  EXPECT_EQ(report.extra, Names{"rest"});
}

TEST_F(Renamed, DifferencesNameTheTreesKeysAndWhatWasSought) {
  Value tree = Value::dict({{"gone", 1}, {"w", floats_of({3}, false)}});
  Error error = error_of([&] { load(tree, directory_, options_); });
  EXPECT_EQ(error.key(), "gone");
  EXPECT_EQ(error.message(),
            "1 key is not in the checkpoint: 'gone' (sought as 'module.gone'); 1 key does not fit: "
            "'w' (the checkpoint's shape is [4], expected [3])");
  tree.erase("w");
  error = error_of([&] { load(tree, directory_, options_); });
  EXPECT_EQ(error.message(), "the checkpoint has no such key (sought as 'module.gone')");
  options_.missing = OnDifference::report;
  EXPECT_EQ(load(tree, directory_, options_).missing, Names{"gone"});
}

TEST_F(Renamed, AFunctionThatThrowsIsHeardOnAllRanks) {
  std::atomic<int> heard{0};
  run_ranks(2, [&](Group& group) {
    Value tree = Value::dict({{"w", floats_of({4}, false)}});
    LoadOptions options;
    options.rename = [&group](const std::string& key) {
      if (group.rank() == 1) throw Error(ErrorCode::limit, "not today");
      return "module." + key;
    };
    if (code_of([&] { load(tree, directory_, options, group); }) == ErrorCode::limit) ++heard;
    EXPECT_TRUE(all_zero(tree["w"]));
  });
  EXPECT_EQ(heard, 2);
}

// Containers without tensors were one item before torch 2.4.
TEST_F(Renamed, AlsoByTheOldRuleOfNames) {
  const Checkpoint old = Checkpoint::open(directory_).map([](Leaf leaf) -> std::optional<Leaf> {
    if (leaf.name == "rest") leaf.value = Value::dict({{"a", 1}, {"b", 2}});
    return leaf;
  });
  Value tree = Value::dict({{"mine", Value::dict({{"a", 0}, {"b", 0}})}});
  options_.rename = [](const std::string& key) { return key == "mine" ? "rest" : key; };
  load(tree, old, options_, *solo_group());
  EXPECT_EQ(tree["mine"]["b"].as_int(), 2);
}

struct Heard {
  std::string phase;
  std::uint64_t bytes, id;
  bool failed;
  bool operator==(const Heard&) const = default;
};

// P-36.
class LoadEvents : public testing::Test {
 protected:
  LoadEvents() {
    save(Value::dict({{"w", floats_of({6})}, {"n", 1}}), directory_);
    options_.events = [this](const Event& event) {
      EXPECT_EQ(event.job, "load");
      EXPECT_EQ(event.checkpoint, directory_);
      const std::lock_guard lock(mutex_);
      if (event.error != nullptr) codes_.push_back(event.error->code());
      heard_[event.rank].push_back(
          {std::string(event.phase), event.bytes, event.id, event.error != nullptr});
    };
  }
  // A rank's phases, each with "!" if it failed.
  [[nodiscard]] Names phases(int rank = 0) {
    Names names;
    for (const Heard& heard : heard_[rank])
      names.push_back(heard.phase + (heard.failed ? "!" : ""));
    return names;
  }

  std::string directory_ = temporary_directory() + "/c";
  LoadOptions options_;
  std::mutex mutex_;
  std::map<int, std::vector<Heard>> heard_;
  std::vector<ErrorCode> codes_;
};

TEST_F(LoadEvents, TellEachRankOfItsPhases) {
  run_ranks(2, [&](Group& group) {
    Value tree = Value::dict({{"w", Value(counting({6}, chunk({6}, group.rank(), 2), 0, false))}});
    load(tree, directory_, options_, group);
  });
  for (const int rank : {0, 1}) {
    EXPECT_EQ(phases(rank), (Names{"open", "plan", "read", "all"}));
    for (const Heard& heard : heard_[rank]) {
      const bool reads = heard.phase == "read" || heard.phase == "all";
      EXPECT_EQ(heard.bytes, reads ? 12U : 0U) << heard.phase;
      EXPECT_EQ(heard.id, heard_[rank][0].id);
    }
  }
  EXPECT_NE(heard_[0][0].id, heard_[1][0].id);
}

TEST_F(LoadEvents, TellOfAFailureOnAllRanks) {
  run_ranks(2, [&](Group& group) {
    Value tree = Value::dict({{"w", floats_of({6}, false)}});
    if (group.rank() == 1) tree["x"] = 1;
    EXPECT_EQ(code_of([&] { load(tree, directory_, options_, group); }), ErrorCode::not_found);
  });
  for (const int rank : {0, 1}) EXPECT_EQ(phases(rank), (Names{"open", "plan!", "all!"}));
  EXPECT_EQ(codes_, std::vector<ErrorCode>(4, ErrorCode::not_found));
}

TEST_F(LoadEvents, TellOfLoadsFromAnOpenCheckpoint) {
  const Checkpoint checkpoint = Checkpoint::open(directory_);
  const Value loaded = checkpoint.load(options_);
  EXPECT_EQ(phases(), (Names{"plan", "read", "all"}));
  EXPECT_EQ(heard_[0].back().bytes, 24U);
  heard_.clear();
  Value tree = Value::dict({{"w", floats_of({6}, false)}});
  load(tree, checkpoint, options_, *solo_group());
  EXPECT_EQ(phases(), (Names{"plan", "read", "all"}));
}

TEST_F(LoadEvents, OfACheckpointThatIsNotThere) {
  std::filesystem::remove_all(directory_);
  Value tree = Value::dict();
  EXPECT_EQ(code_of([&] { load(tree, directory_, options_); }), ErrorCode::not_found);
  EXPECT_EQ(phases(), (Names{"open!", "all!"}));
}

}  // namespace
}  // namespace tessera
