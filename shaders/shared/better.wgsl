// The order of pairs (order key, index): the higher key first, and among equals the lower index.

fn is_better(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.x > b.x || (a.x == b.x && a.y < b.y);
}
