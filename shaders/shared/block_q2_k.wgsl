// Weight blocks of Q2_K: weight = unit scale * scale * quant - unit min * min, a scale and a min for each half of a block. A
// super-block of eight is five vec4: sixteen bytes of scales and, in the high nibbles, mins, then two words of quants for
// each block. Its tail has both f16.
#import block_scale
#import block_halves
#import two_bits
#import bytes

struct Block { scales: vec2<f32>, words: vec2<u32>, scale: vec2<f32>, min: vec2<f32> }

fn block_at(block: u32) -> Block {
    let unit = block >> 3u;
    let at = block & 7u;
    let tail = tail_word(unit);
    let four = w[unit * 5u + 1u + (at >> 1u)];
    let groups = vec2<u32>(w[unit * 5u][at >> 1u] >> (16u * (at & 1u))) >> vec2<u32>(0u, 8u);
    return Block(
        vec2<f32>(1.0),
        select(four.xy, four.zw, (at & 1u) == 1u),
        half_value(tail) * vec2<f32>(groups & vec2<u32>(15u)),
        half_value(tail >> 16u) * vec2<f32>((groups >> vec2<u32>(4u)) & vec2<u32>(15u)),
    );
}

fn quants(b: Block, quad: u32) -> vec4<f32> {
    return b.scale[quad >> 2u] * bytes(two_bits(b.words, quad), 0.0) - b.min[quad >> 2u];
}
