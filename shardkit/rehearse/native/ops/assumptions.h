// No-compute mode: what a program was told that nobody computed, for the rehearsal's verdict.
#pragma once

namespace emu {

// The rows of docs/rehearse.md, in the order of `ASSUMPTIONS` in inject/shardkit_assumed.py.
enum class Assumption { ANY_IS_FALSE, ALL_IS_TRUE, IS_ONE, POSITIONS_GO_ROUND, IS_ZERO, NOT_EQUAL, GIVEN };

void assume(Assumption made);  // tells the listener, who knows the program's line
// The user's number for the program's line, which reads what nobody computed; -1: there is none.
long long given_number();
void see_type(int scalar_type);

}  // namespace emu
