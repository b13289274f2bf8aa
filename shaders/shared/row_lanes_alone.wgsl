// The same for invocations that work alone.
#import lanes_alone
#import rows_part_alone
