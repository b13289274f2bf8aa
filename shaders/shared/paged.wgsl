// Where the key of a position lies: in slot s % slots, or where sequences share the slots, in those of the sequence's pages.
#import state

// The page table in a row of the step state: 0: none, 1: the only one, 2 or 3: the first or second of two, with alternating
// entries.
override PAGE_TABLE: u32 = 0u;

// `row`: where the row of the step state begins that tells of the sequence.
fn slot_of(row: u32, s: u32) -> u32 {
    if (PAGE_TABLE > 0u) {
        let entry = s / PAGE * min(PAGE_TABLE, 2u) + PAGE_TABLE / 3u;
        return state[row + PAGES + entry] * PAGE + s % PAGE;
    }
    return s % params.slots;
}
