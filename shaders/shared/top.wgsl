// The K best of a stream of (order key, id) pairs, kept by a workgroup of WG invocations. The first MAX_K places of
// `pairs` have the best so far in order; the ROOM behind them those that beat the K-th of these, in any order, until
// `merge` puts both together. Pairs are all different, so the outcome does not depend on the order in which they came.
//
// In memory a pair is (bits of the score, id). The places that nothing was found for have all bits set, and so has, but
// for its sign, a score that is not finite: it comes before all others, so that nobody can miss it.
#import better
#import order

const MAX_K: u32 = 1024u;
const ROOM: u32 = 512u;
const NOTHING: vec2<u32> = vec2<u32>(0u, 0xffffffffu); // after every pair

var<workgroup> pairs: array<vec2<u32>, MAX_K + ROOM>;
var<workgroup> n_waiting: atomic<u32>;
var<workgroup> n_loaded: u32;

// Zeros of either sign are equal.
fn score_key(score: f32) -> u32 {
    let is_zero = (bitcast<u32>(score) << 1u) == 0u;
    return select(0xffffffffu, select(order_key(score), 0x80000000u, is_zero), is_finite(score));
}

fn to_key(stored: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(order_key(bitcast<f32>(stored.x)), stored.y);
}

fn from_key(pair: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(select(~pair.x, pair.x & 0x7fffffffu, pair.x >= 0x80000000u), pair.y);
}

// To be called before all else, as workgroup memory may begin with anything: nothing waits.
fn open_room(local: u32) {
    if (local == 0u) {
        atomicStore(&n_waiting, 0u);
    }
    workgroupBarrier();
}

// Lets a pair wait for the next merge; those that find no room are counted and lost.
fn put_aside(pair: vec2<u32>) {
    let place = atomicAdd(&n_waiting, 1u);
    if (place < ROOM) {
        pairs[MAX_K + place] = pair;
    }
}

// How many pairs were put aside, the same for all invocations.
fn waiting(local: u32) -> u32 {
    workgroupBarrier();
    if (local == 0u) {
        n_loaded = atomicLoad(&n_waiting);
    }
    return workgroupUniformLoad(&n_loaded);
}

// How many of `n` ordered pairs from `first` on are better than `pair`.
fn n_better(first: u32, n: u32, pair: vec2<u32>) -> u32 {
    var low = 0u;
    var high = n;
    while (low < high) {
        let middle = (low + high) / 2u;
        if (is_better(pairs[first + middle], pair)) {
            low = middle + 1u;
        } else {
            high = middle;
        }
    }
    return low;
}

// Merges the first `n` pairs that wait into the `k` best. Batcher's bitonic sort, then each pair goes where the number
// of better ones says. All invocations must call it with the same numbers.
fn merge(local: u32, k: u32, n: u32) {
    var size = 1u;
    while (size < n) {
        size *= 2u;
    }
    for (var i = n + local; i < size; i += WG) {
        pairs[MAX_K + i] = NOTHING;
    }
    workgroupBarrier();
    for (var span = 2u; span <= size; span *= 2u) {
        for (var stride = span / 2u; stride > 0u; stride /= 2u) {
            for (var i = local; i < size / 2u; i += WG) {
                let low = 2u * i - (i & (stride - 1u));
                let a = pairs[MAX_K + low];
                let b = pairs[MAX_K + low + stride];
                if (is_better(b, a) == ((low & span) == 0u)) {
                    pairs[MAX_K + low] = b;
                    pairs[MAX_K + low + stride] = a;
                }
            }
            workgroupBarrier();
        }
    }
    const EACH: u32 = (MAX_K + ROOM) / WG;
    var moved = array<vec2<u32>, EACH>();
    var places = array<u32, EACH>();
    for (var j = 0u; j < EACH; j++) {
        let i = j * WG + local;
        moved[j] = pairs[i];
        if (i < k) {
            places[j] = i + n_better(MAX_K, n, moved[j]);
        } else if (i >= MAX_K && i - MAX_K < n) {
            places[j] = i - MAX_K + n_better(0u, k, moved[j]);
        } else {
            places[j] = k;
        }
    }
    workgroupBarrier();
    for (var j = 0u; j < EACH; j++) {
        if (places[j] < k) {
            pairs[places[j]] = moved[j];
        }
    }
    open_room(local);
}
