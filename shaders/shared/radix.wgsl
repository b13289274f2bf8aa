// Radix selection by a workgroup of 256 invocations (WG): histograms of eight bits of keys, and the bin in which a sum from
// the highest bin down reaches what is asked for. Integer sums do not depend on the order in which they are made.

const EACH: u32 = 16u; // keys that an invocation has in registers

var<workgroup> histogram: array<atomic<u32>, 256>;
var<workgroup> stretches: array<u32, 16>; // sums of sixteen bins each
var<workgroup> bin: vec3<u32>;

fn clear_bins(local: u32) {
    atomicStore(&histogram[local], 0u);
    workgroupBarrier();
}

// The highest bin such that it and all above it have at least `need`, what of that the bins above leave for it, and what it
// has. The lowest bin if all have less. All invocations must call it with the same `need`, above 0, and all get the result.
fn find_bin(local: u32, need: u32) -> vec3<u32> {
    workgroupBarrier();
    if (local < 16u) {
        var sum = 0u;
        for (var i = 0u; i < 16u; i++) {
            sum += atomicLoad(&histogram[16u * local + i]);
        }
        stretches[local] = sum;
    }
    workgroupBarrier();
    var above = 0u;
    for (var i = local / 16u + 1u; i < 16u; i++) {
        above += stretches[i];
    }
    for (var i = local + 1u; i % 16u != 0u; i++) {
        above += atomicLoad(&histogram[i]);
    }
    let own = atomicLoad(&histogram[local]);
    if (above < need && (above + own >= need || local == 0u)) {
        bin = vec3<u32>(local, need - above, own);
    }
    return workgroupUniformLoad(&bin);
}

// Whether a key begins as `prefix` does, down to the bits of which the pass that shifts by `shift` makes bins.
fn has_prefix(key: u32, prefix: u32, shift: u32) -> bool {
    // Shifts by 32 are not defined, so the first pass compares nothing.
    return shift == 24u || (key >> (shift + 8u)) == (prefix >> (shift + 8u));
}

// The k-th highest of the keys that the invocations have, how many of its equals are among the first k, and how many there
// are. Keys of 0 count as none; all invocations must call it with the same `k`, above 0 and no more than there are keys.
fn kth_key(local: u32, keys: ptr<function, array<u32, EACH>>, k: u32) -> vec3<u32> {
    var found_key = vec3<u32>(0u, k, 0u);
    for (var shift = 24i; shift >= 0i; shift -= 8i) {
        clear_bins(local);
        for (var j = 0u; j < EACH; j++) {
            let key = (*keys)[j];
            if (key > 0u && has_prefix(key, found_key.x, u32(shift))) {
                atomicAdd(&histogram[(key >> u32(shift)) & 255u], 1u);
            }
        }
        let at = find_bin(local, found_key.y);
        found_key = vec3<u32>(found_key.x | (at.x << u32(shift)), at.yz);
    }
    return found_key;
}
