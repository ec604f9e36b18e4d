// Tests the page as text: it contains the data of the events, no name breaks out of it, and it needs no other file.
#include "twobp/trace/timeline.h"

#include <nlohmann/json.hpp>

#include "tests/trace/support.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::real_trace;

json data_of(const std::string& page) {
  const std::string begin = "<script type=\"application/json\" id=\"data\">";
  const size_t from = page.find(begin);
  EXPECT_NE(from, std::string::npos);
  const size_t to = page.find("</script>", from);
  return json::parse(page.substr(from + begin.size(), to - from - begin.size()));
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(TimelineHtml, HoldsTheEvents) {
  const Trace trace = real_trace();
  const json data = data_of(timeline_html(trace));
  EXPECT_EQ(data.at("title"), "a title");
  EXPECT_EQ(data.at("facts"), json::parse(R"([["micro-batches", "3"]])"));
  ASSERT_EQ(data.at("steps").size(), trace.steps.size());
  for (size_t i = 0; i < trace.steps.size(); ++i) {
    const json& step = data.at("steps")[i];
    EXPECT_EQ(step.at("name"), std::to_string(i + 1));
    EXPECT_NEAR(step.at("seconds").get<double>(), trace.steps[i].seconds(), 1e-9);
    ASSERT_EQ(step.at("ranks").size(), 2U);
    for (size_t r = 0; r < 2; ++r) {
      const auto& events = trace.steps[i].events[r];
      EXPECT_EQ(step.at("ranks")[r].at("stages"), json::array({r}));
      const json& drawn = step.at("ranks")[r].at("events");
      ASSERT_EQ(drawn.size(), events.size());
      for (size_t e = 0; e < events.size(); ++e) {
        EXPECT_EQ(drawn[e][0], static_cast<int>(events[e].kind));
        EXPECT_NEAR(drawn[e][1].get<double>(), events[e].begin - trace.steps[i].begin, 1e-9);
        EXPECT_NEAR(drawn[e][2].get<double>(), events[e].end - events[e].begin, 1e-9);
        EXPECT_EQ(drawn[e][4], events[e].micro_batch);
        const int name = drawn[e][7];
        EXPECT_EQ(name < 0 ? "" : data.at("names")[name].get<std::string>(), events[e].name);
        EXPECT_EQ(drawn[e][13], events[e].peak);
      }
    }
  }
}

TEST(TimelineHtml, NeedsNoOtherFile) {
  const std::string page = timeline_html(real_trace());
  for (const char* part :
       {"http:", "https:", "//cdn", " src=", "href=", "@import", "url(", "fetch(", "XMLHttpRequest"}) {
    EXPECT_EQ(page.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(page.find("@TIMELINE_DATA@"), std::string::npos);
  EXPECT_EQ(page.rfind("<!DOCTYPE html>", 0), 0U);
}

TEST(TimelineHtml, NamesDoNotBreakOut) {
  const std::string clean = timeline_html(real_trace());
  Trace trace = real_trace(test::kHostileName);
  trace.facts = {{test::kHostileName, test::kHostileName}};
  trace.step_names = {test::kHostileName};
  for (Event& event : trace.steps[0].events[0]) {
    if (event.kind == Event::Kind::kBackwardP2) event.name = test::kHostileName;
  }
  const std::string page = timeline_html(trace);
  for (const char* part : {"</script", "<script", "<!--"}) EXPECT_EQ(count(page, part), count(clean, part)) << part;
  const json data = data_of(page);
  EXPECT_EQ(data.at("title").get<std::string>().rfind("</script>", 0), 0U);
  EXPECT_EQ(data.at("facts")[0][1], data.at("title"));
  EXPECT_EQ(data.at("steps")[0].at("name"), data.at("title"));
}

TEST(TimelineHtml, MayHaveNoSteps) {
  EXPECT_TRUE(data_of(timeline_html({})).at("steps").empty());
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
