// The best of what WG invocations found (a power of two), each a pair (order key, index): the highest key, and among
// equals the lowest index. All invocations must call it, and all get the result.
#import better

var<workgroup> found: array<vec2<u32>, WG>;

fn workgroup_best(local: u32, mine: vec2<u32>) -> vec2<u32> {
    found[local] = mine;
    for (var step = WG / 2u; step > 0u; step >>= 1u) {
        workgroupBarrier();
        if (local < step && is_better(found[local + step], found[local])) {
            found[local] = found[local + step];
        }
    }
    return workgroupUniformLoad(&found[0]);
}
