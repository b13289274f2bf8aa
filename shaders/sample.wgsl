// Draws a token from logits with temperature, top-k, top-p and min-p, in one workgroup and without sorting by probability:
//
//     1. highest logit; NON_FINITE is drawn if any logit is NaN or infinite
//     2. top-k:  the largest key with at least k logits at or above it (all ties with the k-th stay)
//     3. top-p:  the largest key such that the logits at or above it hold a share p of what top-k left
//     4. min-p:  a probability of at least min_p times the highest one
//     5. draw from exp((logit - highest) / temperature) over what is left, in the order of ids
//
// Keys order floats as unsigned integers, so steps 2 and 3 are radix selections: four passes, eight bits each, over
// histograms of counts or of fixed-point probability. Integer sums do not depend on order, so the result is
// deterministic. Holtzman et al. 2020, arXiv:1904.09751 (top-p); Nguyen et al. 2024, arXiv:2407.01082 (min-p).
//
// Step 1 reads what `candidates` found in each part of the vocabulary. With top-k step 2 walks its lists, and what is left
// waits in workgroup memory, by id, for the steps that follow. They walk all logits where there are no lists, and where
// ties with the k-th are too many for lists. The sums of steps 3 and 5 have the same terms in the same order either way, so
// the token is the same.
//
// Rows of logits have settings, and a row of the step state, of their own. Dispatch (rows, 1, 1).
#import reduce
#import order
#import sampling
#import state
#import radix

struct SampleParams { n_vocab: u32, n_parts: u32, row_words: u32, found_stride: u32 } // V, P
@group(0) @binding(0) var<uniform> params: SampleParams;
@group(0) @binding(1) var<storage, read> sampling: array<u32>;    // [rows], sampling settings
@group(0) @binding(2) var<storage, read> state: array<u32>;       // step state
@group(0) @binding(3) var<storage, read> logits: array<f32>;      // [rows, V]
@group(0) @binding(4) var<storage, read> found: array<vec2<u32>>; // of `candidates`, a row after the other
@group(0) @binding(5) var<storage, read_write> ids: array<u32>;   // [rows]

const WG: u32 = 256u;
const FIXED: f32 = 1073741824.0; // 2^30 stands for probability 1: sums of a whole vocabulary stay below 2^32

// Where tokens in question are.
const LOGITS: u32 = 0u; // all of them
const LISTS: u32 = 1u;  // of `candidates`, a row after the other
const KEPT: u32 = 2u;   // `kept`

var<workgroup> kept: array<vec2<u32>, MOST>; // (key, id), by id
var<workgroup> n_waiting: atomic<u32>;
var<workgroup> n_kept: u32;
var<workgroup> sums: array<f32, WG>;

// Where the row's own begin.
var<private> own_logits: u32 = 0u;
var<private> own_found: u32 = 0u;

// PCG hash, Jarzynski & Olano 2020, "Hash Functions for GPU Rendering".
fn pcg(input: u32) -> u32 {
    let mixed = input * 747796405u + 2891336453u;
    let word = ((mixed >> ((mixed >> 28u) + 4u)) ^ mixed) * 277803737u;
    return (word >> 22u) ^ word;
}

// Key and id of a token in question.
fn token(source: u32, i: u32) -> vec2<u32> {
    switch source {
        case LISTS: {
            return found[own_found + params.n_parts + i];
        }
        case KEPT: {
            return kept[i];
        }
        default: {
            return vec2<u32>(order_key(logits[own_logits + i]), i);
        }
    }
}

fn logit_of(key: u32) -> f32 {
    return bitcast<f32>(select(~key, key & 0x7fffffffu, key >= 0x80000000u));
}

// The largest key such that the weights of all tokens whose key is at least that (and at least `cut`) reach `wanted`. A
// token's weight is 1, or its probability in fixed point where `by_mass`.
fn select_key(local: u32, source: u32, n: u32, cut: u32, wanted: u32, by_mass: bool, highest: f32, total: f32) -> u32 {
    var prefix = 0u;
    var need = wanted;
    for (var shift = 24i; shift >= 0i; shift -= 8i) {
        clear_bins(local);
        for (var i = local; i < n; i += WG) {
            let key = token(source, i).x;
            if (key >= cut && has_prefix(key, prefix, u32(shift))) {
                var weight = 1u;
                if (by_mass) {
                    weight = u32(exp(logit_of(key) - highest) / total * FIXED);
                }
                atomicAdd(&histogram[(key >> u32(shift)) & 255u], weight);
            }
        }
        // Rounding may leave none that reaches it, then the lowest.
        let at = find_bin(local, need);
        prefix |= at.x << u32(shift);
        need = at.y;
    }
    return prefix;
}

// The k-th highest key of all lists.
fn cut_of_lists(local: u32, k: u32, highest: f32) -> u32 {
    let n = params.n_parts * k;
    if (n > WG * EACH) {
        return select_key(local, LISTS, n, 0u, k, false, highest, 1.0);
    }
    var keys = array<u32, EACH>();
    for (var j = 0u; j < EACH; j++) {
        let i = j * WG + local;
        if (i < n) {
            keys[j] = token(LISTS, i).x;
        }
    }
    return kth_key(local, &keys, k).x;
}

// Puts the tokens of the lists whose key is at least `cut` into `kept` and returns how many they are: more than MOST if
// there is no room for all, or if a list left one out.
fn keep(local: u32, cut: u32, k: u32) -> u32 {
    if (local == 0u) {
        atomicStore(&n_waiting, 0u);
    }
    workgroupBarrier();
    for (var p = local; p < params.n_parts; p += WG) {
        if (found[own_found + p].y == cut) {
            atomicAdd(&n_waiting, MOST + 1u);
        }
    }
    let n_listed = params.n_parts * k;
    // In rounds whose loads do not wait for each other.
    for (var start = 0u; start < n_listed; start += WG * EACH) {
        var pairs = array<vec2<u32>, EACH>();
        for (var j = 0u; j < EACH; j++) {
            let i = start + j * WG + local;
            if (i < n_listed) {
                pairs[j] = token(LISTS, i);
            }
        }
        for (var j = 0u; j < EACH; j++) {
            if (pairs[j].x >= cut) {
                let place = atomicAdd(&n_waiting, 1u);
                if (place < MOST) {
                    kept[place] = pairs[j];
                }
            }
        }
    }
    workgroupBarrier();
    if (local == 0u) {
        n_kept = atomicLoad(&n_waiting);
    }
    let n = workgroupUniformLoad(&n_kept);

    // Each goes where the number of lower ids says.
    const MOVED: u32 = MOST / WG;
    var moved = array<vec2<u32>, MOVED>();
    var places = array<u32, MOVED>();
    let n_moved = min(n, MOST);
    for (var j = 0u; j < MOVED; j++) {
        let i = j * WG + local;
        if (i < n_moved) {
            moved[j] = kept[i];
            for (var other = 0u; other < n_moved; other++) {
                places[j] += select(0u, 1u, kept[other].y < moved[j].y);
            }
        }
    }
    workgroupBarrier();
    for (var j = 0u; j < MOVED; j++) {
        if (j * WG + local < n_moved) {
            kept[places[j]] = moved[j];
        }
    }
    workgroupBarrier();
    return n;
}

@compute @workgroup_size(WG)
fn sample(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let settings = group.x * SETTINGS;
    own_logits = group.x * params.n_vocab;
    own_found = group.x * params.found_stride;
    // A row that is not drawn keeps what is there.
    if (bitcast<f32>(sampling[settings + TEMPERATURE]) <= 0.0) {
        return;
    }
    var highest = LOWEST;
    var broken = 0.0;
    for (var p = local; p < params.n_parts; p += WG) {
        let key = found[own_found + p].x;
        if (key == NON_FINITE) {
            broken = 1.0;
        } else {
            highest = max(highest, logit_of(key));
        }
    }
    highest = workgroup_max(local, highest);
    if (workgroup_max(local, broken) > 0.0) {
        if (local == 0u) {
            ids[group.x] = NON_FINITE;
        }
        return;
    }

    var source = LOGITS;
    var n = params.n_vocab;
    // Of tokens that a mask forbids none is left, unless nothing else is.
    let lowest = select(0u, order_key(LOWEST) + 1u, highest > LOWEST);
    var cut = lowest;
    let k = sampling[settings + TOP_K];
    if (has_lists(k, n)) {
        cut = max(cut_of_lists(local, k, highest), lowest);
        let n_left = keep(local, cut, k);
        if (n_left <= MOST) {
            source = KEPT;
            n = n_left;
        }
    } else if (k > 0u && k < n) {
        cut = max(select_key(local, LOGITS, n, lowest, k, false, highest, 1.0), lowest);
    }
    let is_kept = source == KEPT;
    let top_p = bitcast<f32>(sampling[settings + TOP_P]);
    if (top_p < 1.0) {
        // Each invocation adds up every WG-th id.
        var mass = 0.0;
        let step = select(WG, 1u, is_kept);
        for (var i = select(local, 0u, is_kept); i < n; i += step) {
            let pair = token(source, i);
            if (pair.x >= cut && pair.y % WG == local) {
                mass += exp(logit_of(pair.x) - highest);
            }
        }
        let total = workgroup_sum(local, mass);
        cut = max(cut, select_key(local, source, n, cut, max(u32(top_p * FIXED), 1u), true, highest, total));
    }
    let min_p = bitcast<f32>(sampling[settings + MIN_P]);
    if (min_p > 0.0) {
        // Not above the highest itself: log may round up, and -0 + 0 is +0, whose key is larger.
        cut = max(cut, min(order_key(highest + log(min_p)), order_key(highest)));
    }

    // Each invocation owns a run of ids; the run in which the draw falls is then walked by its owner.
    let temperature = bitcast<f32>(sampling[settings + TEMPERATURE]);
    let run = (params.n_vocab + WG - 1u) / WG;
    let start = select(min(local * run, n), 0u, is_kept);
    let end = select(min(start + run, n), n, is_kept);
    var sum = 0.0;
    for (var i = start; i < end; i++) {
        let pair = token(source, i);
        if (pair.x >= cut && pair.y / run == local) {
            sum += exp((logit_of(pair.x) - highest) / temperature);
        }
    }
    sums[local] = sum;
    workgroupBarrier();
    var before = 0.0;
    var total = 0.0;
    for (var i = 0u; i < WG; i++) {
        if (i == local) {
            before = total;
        }
        total += sums[i];
    }
    let own = group.x * params.row_words;
    let pos = state[own + POS] + select(state[own + N_TOKENS], 1u, params.row_words > 0u); // of the token to be drawn
    let bits = pcg(sampling[settings + SEED_LOW] ^ pcg(sampling[settings + SEED_HIGH] ^ pcg(pos)));
    let threshold = f32(bits >> 8u) * 0x1p-24 * total;
    if (sum > 0.0 && before <= threshold && threshold < before + sum) {
        // Rounding may leave the walk short of the threshold; then the run's last candidate is the one.
        var mark = before;
        var last = 0u;
        for (var i = start; i < end; i++) {
            let pair = token(source, i);
            if (pair.x >= cut && pair.y / run == local) {
                last = pair.y;
                mark += exp((logit_of(pair.x) - highest) / temperature);
                if (mark > threshold) {
                    break;
                }
            }
        }
        ids[group.x] = last;
    }
}
