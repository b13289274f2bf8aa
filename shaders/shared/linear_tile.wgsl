// What the tiled variants of `matmul` share: how x is read and y is written. GUARDED is that of the tile.
#import linear
#import x_quad

fn x_shape() -> vec2<u32> {
    return vec2<u32>(params.n_tokens, params.dim);
}
