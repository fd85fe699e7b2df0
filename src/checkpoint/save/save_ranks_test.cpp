// What ranks promise one another when they save together.
#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <map>
#include <mutex>
#include <random>

#include "base/log.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/save/testing.h"
#include "checkpoint/test_support.h"
#include "conformance/forwarding_group.h"
#include "layout/boxes.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::AllOf;
using ::testing::HasSubstr;

// What a group was asked for.
struct Counts {
  std::atomic<int> folds = 0, spreads = 0, others = 0;
  std::atomic<std::size_t> largest = 0;  // bytes that a rank contributed to a fold
};

class Counting : public testing_support::ForwardingGroup {
 public:
  Counting(Group& inner, Counts& counts) : ForwardingGroup(inner), counts_(counts) {}
  void barrier() override { other().barrier(); }
  std::vector<Bytes> gather(const Bytes& mine, int root) override {
    return other().gather(mine, root);
  }
  std::vector<Bytes> all_gather(const Bytes& mine) override { return other().all_gather(mine); }
  Bytes broadcast(const Bytes& message, int root) override {
    return other().broadcast(message, root);
  }
  Bytes scatter(const std::vector<Bytes>& messages, int root) override {
    return other().scatter(messages, root);
  }
  Bytes fold(Bytes mine, const Combine& combine) override {
    ++counts_.folds;
    for (std::size_t largest = counts_.largest; largest < mine.size();) {
      if (counts_.largest.compare_exchange_weak(largest, mine.size())) break;
    }
    return ForwardingGroup::fold(std::move(mine), combine);
  }
  Bytes spread(Bytes message) override {
    ++counts_.spreads;
    return ForwardingGroup::spread(std::move(message));
  }

 private:
  Group& other() {
    ++counts_.others;
    return inner();
  }
  Counts& counts_;
};

// Rank `rank`'s part of a float tensor whose element i is `first + i`.
Tensor placed(const Shape& shape, const Placement& placement, int rank, float first) {
  Tensor tensor = counting(shape, whole(shape), first, false);
  tensor.pieces.clear();
  for (const Box& box : boxes_of_part(placement, shape, part_of_rank(placement, rank)))
    tensor.pieces.push_back(counting(shape, box, first).pieces.at(0));
  tensor.sharded = placement.parts > 1;
  tensor.placement = placement;
  return tensor;
}

// P-13. Four ranks; "c" has two halves, which ranks 0 and 2, and 1 and 3 hold.
TEST(SaveRanks, WhoWritesWhatSeveralHold) {
  using Writers = std::map<std::string, std::vector<char>>;
  const auto save_by = [](ReplicaWriter rule, bool is_placed) {
    const std::string directory = temporary_directory() + "/c";
    run_ranks(4, [&](Group& group) {
      Tensor c = placed({6}, {.parts = 2}, group.rank(), 1);
      if (!is_placed) c.placement.reset();
      const Value tree = Value::dict({{"a", placed({8}, {}, group.rank(), 1)},
                                      {"b", placed({4}, {}, group.rank(), 1)},
                                      {"c", c},
                                      {"d", placed({8}, {}, group.rank(), 1)}});
      save(tree, directory, {.replicas = rule}, group);
    });
    return writers_in(directory);
  };
  // Bytes of the ranks when "c" comes: 32, 16, 0, 0; and when "d" does: 32, 16, 12, 12.
  EXPECT_EQ(save_by(ReplicaWriter::fewest_bytes, true),
            (Writers{{"a", {'0'}}, {"b", {'1'}}, {"c", {'2', '3'}}, {"d", {'2'}}}));
  // What is told comes behind the rest: "d" comes before "c", with 32, 16, 0, 0, and "c" with 32,
  // 16, 32, 0.
  EXPECT_EQ(save_by(ReplicaWriter::fewest_bytes, false),
            (Writers{{"a", {'0'}}, {"b", {'1'}}, {"c", {'0', '3'}}, {"d", {'2'}}}));
  for (const bool is_placed : {true, false}) {
    EXPECT_EQ(save_by(ReplicaWriter::lowest_rank, is_placed),
              (Writers{{"a", {'0'}}, {"b", {'0'}}, {"c", {'0', '1'}}, {"d", {'0'}}}));
  }
}

TEST(SaveRanks, KeysThatSomeRanksLackAreSavedOrRefused) {
  const std::string directory = temporary_directory() + "/c";
  const auto save_with = [&](bool same_keys) {
    run_ranks(3, [&](Group& group) {
      Value mine = Value::dict({{"all", placed({4}, {.parts = 3}, group.rank(), 1)}});
      mine.set_item("stage" + std::to_string(group.rank()), group.rank());
      if (group.rank() != 1) mine.set_item("most", 5);
      save(mine, directory, {.overwrite = true, .same_keys = same_keys}, group);
    });
  };
  save_with(false);
  EXPECT_EQ(Checkpoint::open(directory).leaves.size(), 5u);
  try {
    save_with(true);
    ADD_FAILURE() << "saved";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::mismatch);
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("4 keys do not fit"),
                      HasSubstr("'stage0': 2 of 3 ranks do not have it, the first is rank 1"),
                      HasSubstr("'most': 1 of 3 ranks do not have it, the first is rank 1"),
                      HasSubstr("'stage2': 2 of 3 ranks do not have it, the first is rank 0")));
  }
}

// OQ-09: one rank's value became everybody's without a word.
TEST(SaveRanks, ValuesThatDifferAreRefusedOrSaid) {
  const std::string directory = temporary_directory() + "/c";
  const auto save_with = [&](IfDiffers policy) {
    run_ranks(3, [&](Group& group) {
      const Value tree = Value::dict({{"same", 1},
                                      {"seed\n", group.rank() == 1 ? 7 : 5},
                                      {"lr\n", group.rank() == 2 ? 0.5 : 0.25}});
      SaveOptions options;
      // Rank 0's word counts.
      options.values = group.rank() == 0 ? policy : IfDiffers::refuse;
      save(tree, directory, options, group);
    });
  };
  try {
    save_with(IfDiffers::refuse);
    FAIL() << "saved";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::mismatch);
    EXPECT_EQ(error.key(), "lr\n");
    EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 2 holds other values of 'lr\\n' than rank 0"),
                                    HasSubstr("1 more key: 'seed\\n'")));
  }
  EXPECT_FALSE(std::filesystem::exists(directory));
  save_with(IfDiffers::warn);
  EXPECT_EQ(Checkpoint::open(directory).load().at("seed\n"), Value(5));
}

TEST(SaveRanks, ValuesThatOnlyLookDifferentAreTheSame) {
  const auto store = memory_store();
  run_ranks(2, [&](Group& group) {
    const Value text("x");
    const bool first = group.rank() == 0;
    const Value state = first ? Value::dict({{"a", 1}, {"b", text}, {"c", text}})
                              : Value::dict({{"b", "x"}, {"c", "x"}, {"a", 1}});
    // In a tuple it is one value.
    EXPECT_NO_THROW(save(Value::dict({{"t", Value::tuple({state})}}), store, group))
        << group.rank();
  });
}

// R07: all that does not fit, in one error.
TEST(SaveRanks, EveryKeyThatDoesNotFitIsTold) {
  const std::string directory = temporary_directory() + "/c";
  run_ranks(2, [&](Group& group) {
    const Shape shape{4, group.rank() == 0 ? 2 : 3};
    const Value tree = Value::dict({{"a", counting(shape, whole(shape), 1)},
                                    {"b\n", counting(shape, whole(shape), 1)},  // told in a line
                                    {"hole", counting({4}, Box{{0}, {2}}, 1)}});
    try {
      save(tree, directory, group);
      ADD_FAILURE() << "saved";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::mismatch);
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("3 keys do not fit"), HasSubstr("'a': lower ranks have float32"),
                        HasSubstr("'b\\n': "), HasSubstr("'hole': ")));
    }
  });
}

TEST(SaveRanks, TheResultIsTheSameOnAllRanks) {
  const std::string directory = temporary_directory() + "/c";
  std::mutex mutex;
  std::vector<SaveResult> results;
  run_ranks(3, [&](Group& group) {
    const Shape shape{6, 2};
    SaveResult result =
        save(Value::dict({{"w", placed(shape, {.parts = 3}, group.rank(), 1)}}), directory, group);
    const std::lock_guard lock(mutex);
    results.push_back(std::move(result));
  });
  std::uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    bytes += entry.file_size();
  for (const SaveResult& result : results) {
    EXPECT_EQ(result.save_id, Checkpoint::open(directory).save_id);
    EXPECT_EQ(result.files, names_in(directory).size());
    EXPECT_EQ(result.total_bytes, bytes);
    EXPECT_TRUE(committed(directory, result.save_id));
  }
  EXPECT_FALSE(committed(directory, "00000000-0000-0000-0000-000000000000"));
  EXPECT_FALSE(committed(temporary_directory() + "/none", results[0].save_id));
}

// OQ-09: each rank's own value is there, and every load finds that of the lowest rank.
TEST(SaveRanks, ValuesThatDifferAreKeptUnderNamesOfTheirRanks) {
  const std::string directory = temporary_directory() + "/c";
  const auto tree_of = [](int rank) {
    return Value::dict({{"w", placed({4}, {.parts = 3}, rank, 1)},
                        {"same", 7},
                        {"data", Value::dict({{"seed", rank == 2 ? 5 : 4}, {"at", rank * 10}})},
                        {"list", Value::list({Value::dict({{"n", rank > 0 ? "b" : "a"}}), rank})}});
  };
  SaveOptions options{.values = IfDiffers::keep, .same_keys = true};
  run_ranks(3, [&](Group& group) { save(tree_of(group.rank()), directory, options, group); });
  const Value loaded = Checkpoint::open(directory).load();
  EXPECT_EQ(floats(loaded.at("w").as_tensor()), floats(counting({4}, whole({4}), 1)));
  EXPECT_EQ(loaded.at("same").as_int(), 7);
  const Value& data = loaded.at("data");
  EXPECT_EQ(data.size(), 5U);
  EXPECT_EQ(data.at("seed").as_int(), 4);
  EXPECT_EQ(data.at("seed.rank2").as_int(), 5);
  EXPECT_EQ(data.at("at").as_int(), 0);
  EXPECT_EQ(data.at("at.rank1").as_int(), 10);
  EXPECT_EQ(data.at("at.rank2").as_int(), 20);
  const Value& element = loaded.at("list").items().at(0);
  EXPECT_EQ(element.at("n").as_string(), "a");
  EXPECT_EQ(element.at("n.rank1").as_string(), "b");
  EXPECT_EQ(loaded.at("list").items().at(1).as_int(), 0);
  EXPECT_EQ(loaded.at("list.1.rank2").as_int(), 2);
  run_ranks(3, [&](Group& group) {
    Value tree = Value::dict({{"data", Value::dict({{"at", -1}})}});
    LoadOptions own;
    own.rename = [rank = std::to_string(group.rank())](const std::string& name) {
      return name == "data.at" && rank != "0" ? name + ".rank" + rank : name;
    };
    load(tree, directory, own, group);
    EXPECT_EQ(tree.at("data").at("at").as_int(), group.rank() * 10);
  });
}

TEST(SaveRanks, ANameOfARankThatIsTakenIsAConflict) {
  const auto store = memory_store();
  run_ranks(3, [&](Group& group) {
    Value tree = Value::dict({{"n", group.rank()}});
    if (group.rank() == 0) tree.set_item("n.rank1", 3);
    try {
      save(tree, store, {.values = IfDiffers::keep}, group);
      ADD_FAILURE() << "saved";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::conflict) << error.what();
      EXPECT_EQ(error.key(), "n.rank1");
    }
  });
}

// A group that loses rank 0 behind the commit: the last message down does not come.
class Losing final : public Counting {
 public:
  Losing(Group& inner, Counts& counts, int last) : Counting(inner, counts), last_(last) {}
  Bytes spread(Bytes message) override {
    Bytes told = Counting::spread(std::move(message));
    if (rank() == 1 && ++spreads_ == last_) throw Error(ErrorCode::peer_failed, "rank 0 is lost");
    return told;
  }

 private:
  int last_;
  int spreads_ = 0;
};

// R03: the others said "failed" and could not find out.
TEST(SaveRanks, AnUnknownOutcomeSaysHowToAsk) {
  const std::string directory = temporary_directory() + "/c";
  Counts counts;
  run_ranks(2, [&](Group& group) {
    Losing losing(group, counts, 4);
    const Value tree = Value::dict({{"w", placed({4}, {.parts = 2}, group.rank(), 1)}});
    if (group.rank() == 0) {
      save(tree, directory, losing);
      return;
    }
    try {
      save(tree, directory, losing);
      ADD_FAILURE() << "saved";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::peer_failed);
      const std::string id = Checkpoint::open(directory).save_id;
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("whether save " + id), HasSubstr("rank 0 is lost")));
      EXPECT_TRUE(committed(directory, id));
    }
  });
}

// P-15 without a cache: what all can compute is not sent, however much it is.
TEST(SaveRanks, PlacedTensorsTakeNoMessages) {
  const auto counted_save = [&](int tensors) {
    auto counts = std::make_unique<Counts>();
    const std::string directory = temporary_directory() + "/c";
    run_ranks(3, [&](Group& group) {
      Counting counting_group(group, *counts);
      Value tree = Value::dict({{"step", 1}});
      for (int i = 0; i < tensors; ++i) {
        tree.set_item("w" + std::to_string(i), placed({9, 2}, {.parts = 3}, group.rank(), 1));
        tree.set_item("b" + std::to_string(i), placed({5}, {}, group.rank(), 2));
      }
      save(tree, directory, counting_group);
    });
    EXPECT_EQ(counts->others, 0);
    return counts;
  };
  const auto few = counted_save(1), many = counted_save(300);
  EXPECT_EQ(few->folds, many->folds);
  EXPECT_EQ(few->spreads, many->spreads);
  EXPECT_LE(many->folds, 3 * 4);  // of three ranks
  EXPECT_LE(many->largest, 1024U + 2 * 32);
}

// To keep what differs costs one fold if nothing does, and three if something does.
TEST(SaveRanks, EqualTensorsThatWouldBeKeptTakeOneMessage) {
  const auto counted_save = [&](int tensors, bool is_unlike) {
    auto counts = std::make_unique<Counts>();
    const std::string directory = temporary_directory() + "/c";
    run_ranks(3, [&](Group& group) {
      Counting counting_group(group, *counts);
      Value tree = Value::dict({{"w", placed({9}, {.parts = 3}, group.rank(), 1)}});
      for (int i = 0; i < tensors; ++i)
        tree.set_item("b" + std::to_string(i), placed({5}, {}, is_unlike ? group.rank() : 0, 2));
      if (is_unlike)
        tree.set_item("c", counting({2}, whole({2}), static_cast<float>(group.rank())));
      save(tree, directory, {.copies = IfDiffers::keep}, counting_group);
    });
    return counts;
  };
  const auto few = counted_save(1, false), many = counted_save(300, false);
  EXPECT_EQ(few->folds, 3 * 5);  // of three ranks
  EXPECT_EQ(many->folds, 3 * 5);
  EXPECT_EQ(counted_save(1, true)->folds, 3 * 7);
  EXPECT_LE(many->largest, 1024U);
}

// Digests of blocks stay in the tails of files: what a rank reports does not grow with its files.
TEST(SaveRanks, AReportDoesNotGrowWithTheFiles) {
  const auto largest_message = [](std::int64_t rows) {
    Counts counts;
    const std::string directory = temporary_directory() + "/c";
    run_ranks(2, [&](Group& group) {
      Counting counting_group(group, counts);
      Value tree =
          Value::dict({{"w", placed({rows, 1 << 18}, {.parts = 2}, group.rank(), 1)}});  // MiB
      SaveOptions options;
      options.threads = 1;
      save(tree, directory, options, counting_group);
    });
    return counts.largest.load();
  };
  const std::size_t small = largest_message(2);
  EXPECT_EQ(largest_message(64), small);
}

// However tensors are placed, every rank computes what rank 0 publishes.
TEST(SaveRanks, EveryPlacementIsReadBack) {
  std::mt19937 random(17);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int round = 0; round < 60; ++round) {
    const int ranks = draw(1, 7);
    std::vector<std::pair<Shape, Placement>> tensors;
    for (int i = draw(1, 9); i > 0; --i) {
      Shape shape(static_cast<std::size_t>(draw(0, 3)));
      for (auto& size : shape) size = draw(0, 9) == 0 ? 0 : draw(1, 7);
      Placement placement{.parts = draw(1, ranks)};
      placement.stride = draw(1, ranks / placement.parts);
      if (!shape.empty()) placement.dim = draw(0, static_cast<int>(shape.size()) - 1);
      if (draw(0, 2) == 0) placement.shard = draw(1, 60), placement.begin = draw(0, 30);
      if (!fits(placement, shape, ranks)) placement = {};
      tensors.emplace_back(shape, placement);
    }
    SaveOptions options;
    options.threads = draw(1, 3);
    if (draw(0, 1) == 1) options.replicas = ReplicaWriter::lowest_rank;
    const bool tell_some = draw(0, 2) == 0;
    const std::string directory = temporary_directory() + "/c";
    run_ranks(ranks, [&](Group& group) {
      Value tree = Value::dict({{"step", 1}, {"a", "text"}});
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        const auto& [shape, placement] = tensors[i];
        Tensor tensor = placed(shape, placement, group.rank(), static_cast<float>(i));
        // Then ranks have to tell what they hold.
        if (tell_some && i % 2 == 0) tensor.placement.reset(), tensor.sharded = true;
        tree.set_item("t" + std::to_string(i), std::move(tensor));
      }
      save(tree, directory, options, group);
    });
    const Value loaded = Checkpoint::open(directory).load();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const Shape& shape = tensors[i].first;
      EXPECT_EQ(floats(loaded.at("t" + std::to_string(i)).as_tensor()),
                floats(counting(shape, whole(shape), static_cast<float>(i))))
          << "round " << round << ", tensor " << i;
    }
    EXPECT_TRUE(verify(directory).findings.empty());
  }
}

// What only another rank has keeps the type of its keys, too.
TEST(SaveRanks, KeysOfOtherRanksKeepTheirTypes) {
  const auto store = memory_store();
  run_ranks(2, [&](Group& group) {
    Value state = Value::dict();
    for (const Value& key : {Value(std::int64_t{group.rank()}),
                             Value::tuple({Value("a"), Value(std::int64_t{group.rank()})})})
      state.set_item(key, Value(counting({2}, whole({2}), 1)));
    save(Value::dict({{"state", state}, {"step", 1}}), store, {}, group);
  });
  const Value state = Checkpoint::open(store).load().at("state");
  EXPECT_EQ(state.size(), 4U);
  for (const std::int64_t rank : {0, 1}) {
    EXPECT_NE(state.find_key(Value(rank)), nullptr) << rank;
    EXPECT_NE(state.find_key(Value::tuple({Value("a"), Value(rank)})), nullptr) << rank;
  }
}

}  // namespace
}  // namespace tessera
