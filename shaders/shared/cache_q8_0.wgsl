// Reads and writes a cache of this type.
#import keys_q8_0
#import fresh_q8_0
