// Runs the compiled kernel without Python and compares every result with a loop in float64. Prints the largest errors
// of each kind of call, and exits with 1 if one is above the bar.
#include <stdio.h>
#include <time.h>

#include <map>

#include "passes.h"

using namespace cases;

namespace clearhead {
#ifdef __aarch64__
static const Kernels* const SETS[] = {&neon_kernels, &generic_kernels};
#else
static const Kernels* const SETS[] = {&generic_kernels};
#endif
}  // namespace clearhead

namespace {

constexpr double BAR = 1e-5;
constexpr Type TYPES[] = {Type::float32, Type::bfloat16, Type::float16};
const char* const NAMES[] = {"float32", "bfloat16", "float16"};

// A tile of rows, and so few that they are decoded.
void add_masks(std::vector<Case>& to) {
    const char* const names[] = {"no mask",       "causal",      "window",        "bottom right",   "lengths",
                                 "runs",          "key marks",   "marks",         "marks of heads", "bias",
                                 "bias of heads", "turned bias", "bias and marks"};
    for (int m = 0; m <= static_cast<int>(Mask::both); m++)
        for (const int64_t rows : {29, 3}) {
            Case c;
            c.kind = names[m], c.mask = static_cast<Mask>(m), c.rows = rows, c.keys = rows == 29 ? 67 : 150;
            c.statistics = true;
            to.push_back(c);
            c.sinks = c.lse_gradient = true, c.softcap = 3, c.poison = true, c.threads = 1, c.exact = true;
            to.push_back(c);
        }
}

void add_sizes(std::vector<Case>& to) {
    for (const int64_t dim : {1, 7, 8, 13, 16, 33, 64, 80, 96, 128, 256})
        for (const int64_t rows : {19, 2}) {
            Case c;
            c.kind = "head sizes", c.batch = 1, c.dim = dim, c.value_dim = rows == 2 && dim > 1 ? dim - 1 : dim;
            c.rows = rows, c.keys = 37, c.statistics = true, c.mask = Mask::causal;
            to.push_back(c);
        }
    for (const int64_t keys : {1, 5, 16, 64, 129, 700}) {
        Case c;
        c.kind = "one query", c.rows = 1, c.keys = keys, c.dim = c.value_dim = 32, c.statistics = true;
        to.push_back(c);
    }
    for (const int64_t kv_heads : {1, 2, 6})
        for (const int64_t rows : {1, 5, 41}) {
            Case c;
            c.kind = "grouped heads", c.heads = 6, c.kv_heads = kv_heads, c.rows = rows, c.threads = 3;
            to.push_back(c);
        }
}

void add_options(std::vector<Case>& to) {
    for (const int64_t rows : {4, 31}) {
        Case c;
        c.rows = rows, c.statistics = true;
        c.kind = "soft-cap", c.softcap = 2, to.push_back(c), c.softcap = 0;
        c.kind = "sinks", c.sinks = true, to.push_back(c), c.sinks = false;
        c.kind = "gradient of lse", c.lse_gradient = true, to.push_back(c), c.lse_gradient = false;
        c.kind = "large scores", c.spread = 6, c.exact = true, to.push_back(c), c.spread = 1, c.exact = false;
        c.kind = "dropout", c.drop_below = 6554, c.statistics = false, to.push_back(c);
        c.mask = Mask::window, to.push_back(c);
    }
    for (const int64_t rows : {2, 23}) {
        Case c;
        c.kind = "long", c.batch = 1, c.heads = c.kv_heads = 1, c.rows = rows, c.keys = 4500, c.dim = c.value_dim = 8;
        c.statistics = rows == 23;
        to.push_back(c);
    }
}

void add_packed(std::vector<Case>& to) {
    for (const Mask mask : {Mask::none, Mask::causal, Mask::window}) {
        Case c;
        c.kind = "packed", c.batch = 1, c.mask = mask, c.cu_seqlens_q = {0, 17, 18, 18, 60},
        c.cu_seqlens_k = {0, 20, 33, 33, 75};
        c.rows = 60, c.keys = 75, c.threads = 3;
        to.push_back(c);
        c.sinks = c.lse_gradient = true, c.drop_below = 9000;
        to.push_back(c);
    }
}

std::vector<Case> all_cases() {
    std::vector<Case> found, result;
    add_masks(found), add_sizes(found), add_options(found), add_packed(found);
    for (const Type type : TYPES)
        for (Case c : found) c.type = type, result.push_back(c);
    return result;
}

// Prints a line for each kind and type; whether all are within the bar.
bool report(const std::vector<std::string>& order, std::map<std::string, checks::Errors>& errors) {
    const char* const passes[] = {"forward", "backward", "statistics"};
    bool good = true;
    for (const std::string& name : order) {
        const checks::Errors& of_kind = errors[name];
        printf("%-27s%3lld calls", name.c_str(), static_cast<long long>(of_kind.calls));
        for (int pass = 0; pass < checks::PASSES; pass++) {
            if (of_kind.result[pass].empty()) continue;
            const bool within = of_kind.largest[pass] <= BAR;
            printf("  %s %.1e (%s)%s", passes[pass], of_kind.largest[pass], of_kind.result[pass].c_str(),
                   within ? "" : " ABOVE THE BAR");
            good = good && within;
        }
        printf("\n");
    }
    return good;
}

}  // namespace

int main() {
    bool good = true;
    for (const clearhead::Kernels* kernels : clearhead::SETS) {
        std::map<std::string, checks::Errors> errors;
        std::vector<std::string> order;
        const clock_t start = clock();
        std::mt19937_64 random(20);
        int64_t calls = 0;
        for (const Case& c : all_cases()) {
            const std::string name = c.kind + ", " + NAMES[static_cast<int>(c.type)];
            if (!errors.count(name)) order.push_back(name);
            checks::check(*kernels, c, random, errors[name]);
            errors[name].calls++, calls++;
        }
        printf("== %s\n", kernels->name);
        good = report(order, errors) && good;
        const double seconds = static_cast<double>(clock() - start) / CLOCKS_PER_SEC;
        printf("%s: %lld calls, %.0f s of processor time\n", kernels->name, static_cast<long long>(calls), seconds);
    }
    printf(good ? "all errors are at most %.0e\n" : "some errors are above %.0e\n", BAR);
    return good ? 0 : 1;
}
