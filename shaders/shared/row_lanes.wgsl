// Invocations that share rows, and read x through workgroup memory.
#import lanes
#import rows_part
