// Weight blocks of Q5_0: weight = scale * (quant - 16). A block is the vec4 of Q4_0; its tail of three halves has the f16
// scale and a word of fifth bits. Fifth bit j of byte i is that of weight 4 j + i.
#import block_scale
#import block_halves
#import nibbles
#import bytes

struct Block { scales: vec2<f32>, words: vec4<u32>, fifths: u32 }

fn block_at(block: u32) -> Block {
    let first = tail_word((3u * block) >> 1u);
    let second = tail_word(((3u * block) >> 1u) + 1u);
    let is_odd = (block & 1u) == 1u;
    let scale = half_value(select(first, first >> 16u, is_odd));
    return Block(vec2<f32>(scale), w[block], select((first >> 16u) | (second << 16u), second, is_odd));
}

fn quants(b: Block, quad: u32) -> vec4<f32> {
    return bytes(nibbles_of(b.words, quad) | (((b.fifths >> quad) & 0x01010101u) << 4u), 16.0);
}
