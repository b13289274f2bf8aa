// What `sample` may draw: the top k logits of each part of the vocabulary, among which are the top k of all. A part's list
// has exactly k pairs (order key, id) in no order, filled up with zeros where the part is shorter. A part also says its
// highest key, or all bits if one of its logits is NaN or infinite, and the key of ties that its list left out, or 0.
//
// The k-th key is a radix selection over the part's keys, which stay in registers. Without top-k, or with more than MOST,
// there are no lists.
//
// Rows of logits have settings of their own. Dispatch (P, rows, 1), one workgroup for each part.
#import order
#import sampling
#import radix

struct SampleParams { n_vocab: u32, n_parts: u32, row_words: u32, found_stride: u32 } // V, P
@group(0) @binding(0) var<uniform> params: SampleParams;
@group(0) @binding(1) var<storage, read> sampling: array<u32>;          // [rows], sampling settings
@group(0) @binding(2) var<storage, read> logits: array<f32>;            // [rows, V]
@group(0) @binding(3) var<storage, read_write> found: array<vec2<u32>>; // of each row [P] of (highest, left out), [P, k] of (key, id)

const WG: u32 = 256u;
const PART: u32 = WG * EACH; // logits of a part

var<workgroup> highest: atomic<u32>;
var<workgroup> n_above: atomic<u32>;
var<workgroup> n_tied: atomic<u32>;

@compute @workgroup_size(WG)
fn candidates(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let first = group.x * PART;
    let own_logits = group.y * params.n_vocab;
    let own_found = group.y * params.found_stride;
    let n = min(params.n_vocab - first, PART);
    if (local == 0u) {
        atomicStore(&highest, 0u);
        atomicStore(&n_above, 0u);
        atomicStore(&n_tied, 0u);
    }
    workgroupBarrier();
    var keys = array<u32, EACH>(); // 0 is below the key of every finite float
    var mine = 0u;
    for (var j = 0u; j < EACH; j++) {
        let c = j * WG + local;
        if (c < n) {
            let logit = logits[own_logits + first + c];
            keys[j] = select(NON_FINITE, order_key(logit), is_finite(logit));
            mine = max(mine, keys[j]);
        }
    }
    atomicMax(&highest, mine);

    var left_out = 0u;
    let k = sampling[group.y * SETTINGS + TOP_K];
    if (has_lists(k, params.n_vocab)) {
        let n_listed = min(k, n);
        let kth = kth_key(local, &keys, n_listed);
        let cut = kth.x;
        // Of those with the cut's own key as many as there is room for.
        let need = kth.y;
        left_out = select(0u, cut, kth.z > need);
        let list = own_found + params.n_parts + group.x * k;
        for (var j = 0u; j < EACH; j++) {
            let pair = vec2<u32>(keys[j], first + j * WG + local);
            if (pair.x > cut) {
                found[list + atomicAdd(&n_above, 1u)] = pair;
            } else if (pair.x == cut) {
                let place = atomicAdd(&n_tied, 1u);
                if (place < need) {
                    found[list + n_listed - need + place] = pair;
                }
            }
        }
        for (var i = n_listed + local; i < k; i += WG) {
            found[list + i] = vec2<u32>(0u, 0u);
        }
    }
    workgroupBarrier();
    if (local == 0u) {
        found[own_found + group.x] = vec2<u32>(atomicLoad(&highest), left_out);
    }
}
