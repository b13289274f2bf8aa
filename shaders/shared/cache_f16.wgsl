// Reads and writes a cache of this type.
#import keys_f16
#import fresh_f16
