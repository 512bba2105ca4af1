// One case through the forward pass, the backward pass and the statistics.
#pragma once
#include "checks.h"

namespace checks {

inline clearhead::Documents documents_of(const Case& c) {
    const auto count = static_cast<int64_t>(c.row_starts.size()) - 1;
    if (count < 0) return {};
    return {count, c.row_starts.data(), c.key_starts.data()};
}

inline bool forward(const clearhead::Kernels& kernels, const Case& c, const Problem& p) {
    const clearhead::Documents documents = documents_of(c);
    return documents.count ? run_documents_forward(kernels, p, documents, c.threads)
                           : run_forward(kernels, p, c.threads);
}

// The forward pass in the case's own type, as inference runs it.
inline bool check_forward(const clearhead::Kernels& kernels, const Case& c, Operands& o, const judge::Results& expected,
                          Errors& errors) {
    Tensor output(c.type, c.batch, c.heads, c.rows, c.value_dim);
    if (!forward(kernels, c, problem_of(c, o, output, nullptr))) return false;
    errors.note(FORWARD, "output", error_of(output.numbers(), expected.output, c.type));
    return true;
}

// Sums of the judge's gradient of a bias over what the bias is shared by.
inline Numbers shared(const Case& c, const Numbers& dense) {
    int64_t batch, heads;
    cases::shape_of_bias(c, batch, heads);
    const size_t cells = static_cast<size_t>(c.rows * c.keys), planes = static_cast<size_t>(batch * heads);
    Numbers result(planes * cells, 0);
    for (size_t n = 0; n < dense.size(); n++) result[n / cells % planes * cells + n % cells] += dense[n];
    return result;
}

// Forward with an output in float32 and lse, then backward.
inline bool check_backward(const clearhead::Kernels& kernels, const Case& c, Operands& o,
                           const judge::Results& expected, Errors& errors) {
    Tensor output(Type::float32, c.batch, c.heads, c.rows, c.value_dim);
    Tensor query(c.type, c.batch, c.heads, c.rows, c.dim), key(c.type, c.batch, c.kv_heads, c.keys, c.dim);
    Tensor value(c.type, c.batch, c.kv_heads, c.keys, c.value_dim);
    const size_t lines = static_cast<size_t>(c.batch * c.heads * c.rows);
    std::vector<double> lse(lines);
    std::vector<float> correction(lines), bias;
    Problem p = problem_of(c, o, output, lse.data());
    if (!forward(kernels, c, p)) return false;
    errors.note(FORWARD, "output", error_of(output.numbers(), expected.output));
    errors.note(FORWARD, "lse", error_of(lse, expected.lse));
    p.exact_output = p.output, p.output_gradient = o.output_gradient.view();
    p.query_gradient = query.view(), p.key_gradient = key.view(), p.value_gradient = value.view();
    p.correction = correction.data(), p.lse_gradient = o.lse_gradient.empty() ? nullptr : o.lse_gradient.data();
    if (c.mask == cases::Mask::bias || c.mask == cases::Mask::bias_of_heads) {
        bias.assign(shared(c, expected.bias_gradient).size(), 0);
        p.bias_gradient = {bias.data(), c.mask == cases::Mask::bias ? c.heads * c.rows * c.keys : 0, c.rows * c.keys,
                           c.keys, 1};
    }
    const clearhead::Documents documents = documents_of(c);
    if (!(documents.count ? run_documents_backward(kernels, p, documents, c.threads)
                          : run_backward(kernels, p, c.threads)))
        return false;
    errors.note(BACKWARD, "dquery", error_of(query.numbers(), expected.query_gradient, c.type));
    errors.note(BACKWARD, "dkey", error_of(key.numbers(), expected.key_gradient, c.type));
    errors.note(BACKWARD, "dvalue", error_of(value.numbers(), expected.value_gradient, c.type));
    errors.note(BACKWARD, "delta", error_of(numbers(correction), expected.correction));
    if (!bias.empty()) errors.note(BACKWARD, "dbias", error_of(numbers(bias), shared(c, expected.bias_gradient)));
    return true;
}

constexpr int64_t TOP = 5, MAP = 7, SINK_KEYS = 2, OFFSETS[] = {-3, 0, 2}, OFFSET_COUNT = 3;

// Memory of all statistics of a case.
struct Written {
    Tensor output;
    std::vector<double> lse;
    std::vector<uint8_t> counted;
    std::vector<float> largest, visible, raw, entropy, confidence, norm, received, viewers, top, weights, map, sink,
        distance, stripes;
    std::vector<int64_t> top_keys;
    std::vector<int32_t> first_keys;
    Statistics s = {};

    Written(const Case& c, std::mt19937_64& random) : output(c.type, c.batch, c.heads, c.rows, c.value_dim) {
        const auto size = [](int64_t count) { return static_cast<size_t>(count); };
        const int64_t planes = c.batch * c.heads, lines = planes * c.rows;
        lse.resize(size(lines)), top_keys.resize(size(lines * TOP));
        for (int64_t n = 0; n < c.batch * c.rows; n++) counted.push_back(random() % 4 != 0);
        for (int64_t n = 0; n < planes * SINK_KEYS; n++)
            first_keys.push_back(static_cast<int32_t>(random() % size(c.keys)) - (n % 5 == 0));
        for (auto* each : {&largest, &visible, &raw, &entropy, &confidence, &norm, &sink, &distance})
            each->resize(size(lines));
        received.resize(size(planes * c.keys)), viewers.resize(size(planes * c.keys)), top.resize(size(lines * TOP));
        weights.resize(size(lines * c.keys)), map.resize(size(planes * MAP * MAP)),
            stripes.resize(size(lines * OFFSET_COUNT));
        s.counted = counted.data(), s.largest = largest.data(), s.visible = visible.data(), s.raw = raw.data();
        s.entropy = entropy.data(), s.confidence = confidence.data(), s.norm = norm.data();
        s.received = received.data(), s.viewers = viewers.data(), s.top_weights = top.data(),
        s.top_keys = top_keys.data();
        s.top = TOP, s.weights = {weights.data(), c.heads * c.rows * c.keys, c.rows * c.keys, c.keys, 1};
        s.map = map.data(), s.map_rows = s.map_columns = MAP, s.sink = sink.data(), s.first_keys = first_keys.data();
        s.sink_keys = SINK_KEYS, s.distance = distance.data(), s.shift = c.keys - c.rows, s.exact = c.exact;
        s.stripes = stripes.data(), s.offsets = OFFSETS, s.offset_count = OFFSET_COUNT;
    }
};

// What the judge's weights say of each statistic, beside the kernel's.
struct Expected {
    Numbers largest, visible, raw, entropy, confidence, norm, received, viewers, top, weights_at_top, map, sink,
        distance, stripes;
};

// Of one row; `weights` and `scores` are its own.
inline void expect_row(const Case& c, const judge::Call& call, const judge::Results& r, const Written& w, int64_t line,
                       Expected& e) {
    const int64_t row = line % c.rows, plane = line / c.rows, shift = c.keys - c.rows;
    const double* weights = &r.weights[static_cast<size_t>(line * c.keys)];
    const double* scores = &r.scores[static_cast<size_t>(line * c.keys)];
    const double* raw = &r.raw[static_cast<size_t>(line * c.keys)];
    const uint8_t* sees = &call.sees[static_cast<size_t>(line * c.keys)];
    const bool counted = w.counted[static_cast<size_t>(plane / c.heads * c.rows + row)];
    double entropy = 0, distance = 0, sink = 0, norm = 0;
    for (int64_t j = 0; j < c.keys; j++) {
        if (weights[j] > 0) entropy -= weights[j] * log(weights[j]);
        distance += weights[j] * static_cast<double>(std::abs(row + shift - j));
        const size_t of_key = static_cast<size_t>(plane * c.keys + j);
        if (counted) e.received[of_key] += weights[j], e.viewers[of_key] += sees[j];
        if (counted)
            e.map[static_cast<size_t>((plane * MAP + row * MAP / c.rows) * MAP + j * MAP / c.keys)] += weights[j];
    }
    for (int64_t n = 0; n < SINK_KEYS; n++) {
        const int32_t key = w.first_keys[static_cast<size_t>(plane * SINK_KEYS + n)];
        if (key >= 0) sink += weights[key];
    }
    for (const int64_t offset : OFFSETS) {
        const int64_t key = row + shift + offset;
        e.stripes.push_back(0 <= key && key < c.keys && sees[key] ? weights[key] : -1);
    }
    for (int64_t d = 0; d < c.value_dim; d++) norm += pow(r.undropped[static_cast<size_t>(line * c.value_dim + d)], 2);
    Numbers sorted(weights, weights + c.keys);
    std::sort(sorted.rbegin(), sorted.rend());
    sorted.resize(static_cast<size_t>(std::max(c.keys, TOP)), 0);
    for (size_t rank = 0; rank < TOP; rank++) {
        const int64_t key = w.top_keys[static_cast<size_t>(line) * TOP + rank];
        e.top.push_back(sorted[rank]), e.weights_at_top.push_back(key < 0 ? 0 : weights[key]);
    }
    e.largest.push_back(*std::max_element(scores, scores + c.keys)),
        e.raw.push_back(*std::max_element(raw, raw + c.keys));
    e.visible.push_back(static_cast<double>(std::count(sees, sees + c.keys, 1)));
    e.confidence.push_back(sorted[0]), e.entropy.push_back(entropy), e.distance.push_back(distance);
    e.sink.push_back(sink), e.norm.push_back(sqrt(norm));
}

inline bool check_statistics(const clearhead::Kernels& kernels, const Case& c, Operands& o, const judge::Call& call,
                             const judge::Results& r, std::mt19937_64& random, Errors& errors) {
    Written w(c, random);
    Problem p = problem_of(c, o, w.output, w.lse.data());
    p.drop_below = 0;
    if (!run_statistics(kernels, p, w.s, c.threads)) return false;
    Expected e;
    for (Numbers* each : {&e.received, &e.viewers}) each->assign(static_cast<size_t>(c.batch * c.heads * c.keys), 0);
    e.map.assign(static_cast<size_t>(c.batch * c.heads * MAP * MAP), 0);
    for (int64_t line = 0; line < c.batch * c.heads * c.rows; line++) expect_row(c, call, r, w, line, e);
    const auto note = [&](const char* name, const std::vector<float>& got, const Numbers& expected) {
        errors.note(STATISTICS, name, error_of(numbers(got), expected));
    };
    errors.note(STATISTICS, "output", error_of(w.output.numbers(), r.undropped, c.type));
    errors.note(STATISTICS, "lse", error_of(w.lse, r.lse));
    note("largest", w.largest, e.largest), note("raw", w.raw, e.raw), note("visible", w.visible, e.visible);
    note("entropy", w.entropy, e.entropy), note("confidence", w.confidence, e.confidence), note("norm", w.norm, e.norm);
    note("received", w.received, e.received), note("viewers", w.viewers, e.viewers), note("map", w.map, e.map);
    note("top", w.top, e.top), errors.note(STATISTICS, "top", error_of(e.weights_at_top, e.top)),
        note("weights", w.weights, r.weights);
    note("sink", w.sink, e.sink), note("distance", w.distance, e.distance), note("stripes", w.stripes, e.stripes);
    return true;
}

// False if there was no memory.
inline bool check(const clearhead::Kernels& kernels, const Case& c, std::mt19937_64& random, Errors& errors) {
    Operands operands = cases::draw(c, random);
    const judge::Call call = judged(c, operands);
    const judge::Results expected = judge::compute(call);
    return check_forward(kernels, c, operands, expected, errors) &&
           check_backward(kernels, c, operands, expected, errors) &&
           (!c.statistics || check_statistics(kernels, c, operands, call, expected, random, errors));
}

}  // namespace checks
