// Reads and writes a cache of this type.
#import keys_f32
#import fresh_f32
